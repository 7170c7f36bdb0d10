"""Reads and tidies images that lie in a folder as the OCI image layout says; knows nothing of who put them there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer: the digest of what is moved, its size, and the digest of what it unpacks to."""

    digest: str
    bytes: int
    unpacked_digest: str


@dataclass(frozen=True, slots=True)
class Image:
    """One image in a layout. `config` is its configuration as the image specification says."""

    name: str
    manifest_digest: str
    layers: tuple[Layer, ...]
    config: dict[str, Any]

    @property
    def bytes(self) -> int:
        """What a node that has none of its layers pulls."""
        return sum(layer.bytes for layer in self.layers)

    @property
    def labels(self) -> dict[str, str]:
        """Its labels."""
        return dict(self.config["config"].get("Labels") or {})


def image(layout: Path) -> Image:
    """The only image of a layout."""
    [entry] = _json(layout / "index.json")["manifests"]
    manifest = _json(_blob(layout, entry["digest"]))
    config = _json(_blob(layout, manifest["config"]["digest"]))
    unpacked = config["rootfs"]["diff_ids"]
    layers = tuple(
        Layer(layer["digest"], layer["size"], whole)
        for layer, whole in zip(manifest["layers"], unpacked, strict=True)
    )
    return Image(entry["annotations"]["org.opencontainers.image.ref.name"], entry["digest"], layers, config)


def keep_newest(layout: Path) -> None:
    """Leave the image that was put there last, and no blob that it does not need."""
    index = _json(layout / "index.json")
    index["manifests"] = index["manifests"][-1:]
    # A rename is atomic: whoever reads meanwhile sees the old index or the new one.
    written = layout / "index.json.new"
    written.write_text(json.dumps(index))
    written.replace(layout / "index.json")
    needed = {_blob(layout, digest) for digest in _digests(layout, index)}
    for blob in (layout / "blobs").glob("*/*"):
        if blob not in needed:
            blob.unlink()


def _digests(layout: Path, index: dict[str, Any]) -> Iterator[str]:
    for entry in index["manifests"]:
        manifest = _json(_blob(layout, entry["digest"]))
        yield entry["digest"]
        yield manifest["config"]["digest"]
        yield from (layer["digest"] for layer in manifest["layers"])


def _blob(layout: Path, digest: str) -> Path:
    return layout / "blobs" / digest.replace(":", "/")


def _json(file: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(file.read_text())
    return found
