"""Reads and tidies images that lie in a folder as the OCI image layout says; knows nothing of who put them there."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_NAME = "org.opencontainers.image.ref.name"


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
        """Return what a node that has none of its layers pulls."""
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
        Layer(layer["digest"], layer["size"], whole) for layer, whole in zip(manifest["layers"], unpacked, strict=True)
    )
    return Image(entry["annotations"][_NAME], entry["digest"], layers, config)


def full_name(reference: str) -> str:
    """A name with its registry: moejob-operator:1 is docker.io/library/moejob-operator:1 to clients that pull."""
    registry, slash, _ = reference.partition("/")
    if slash and ("." in registry or ":" in registry or registry == "localhost"):
        return reference
    return f"docker.io/{reference}" if slash else f"docker.io/library/{reference}"


def holds(layout: Path, digests: Iterable[str]) -> bool:
    """Return whether these blobs are there."""
    return all(_blob(layout, digest).exists() for digest in digests)


def put(layout: Path, blob: Path) -> None:
    """Take in a file that is named by its SHA-256."""
    place = _blob(layout, f"sha256:{blob.name}")
    place.parent.mkdir(parents=True, exist_ok=True)
    blob.replace(place)


def keep_newest(layout: Path) -> None:
    """Leave the image that was put there last, and no blob that it does not need."""
    index = _json(layout / "index.json")
    [newest] = index["manifests"] = index["manifests"][-1:]
    # What `ctr images import` calls it; the kubelet looks for the full name.
    newest["annotations"]["io.containerd.image.name"] = full_name(newest["annotations"][_NAME])
    # A rename is atomic: a reader meanwhile sees the old index or the new one.
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
