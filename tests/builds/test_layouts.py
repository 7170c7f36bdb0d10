"""Layouts of images, made by hand."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from image_builds import layouts


def put(layout: Path, content: bytes) -> str:
    """A blob. Returns its digest."""
    name = hashlib.sha256(content).hexdigest()
    (layout / "blobs" / "sha256").mkdir(parents=True, exist_ok=True)
    (layout / "blobs" / "sha256" / name).write_bytes(content)
    return f"sha256:{name}"


def entry(layout: Path, name: str, layers: list[bytes]) -> dict[str, Any]:
    """An image of these layers, as an index names it."""
    digests = [put(layout, layer) for layer in layers]
    config = put(layout, json.dumps({"config": {"Labels": {"a": name}}, "rootfs": {"diff_ids": digests}}).encode())
    moved = [{"digest": digest, "size": len(layer)} for digest, layer in zip(digests, layers, strict=True)]
    manifest = put(layout, json.dumps({"config": {"digest": config}, "layers": moved}).encode())
    return {"digest": manifest, "annotations": {"org.opencontainers.image.ref.name": name}}


def test_of_several_images_the_newest_stays_with_what_it_shares(tmp_path: Path) -> None:
    before = entry(tmp_path, "moejob-operator:1", [b"base", b"old code"])
    after = entry(tmp_path, "moejob-operator:2", [b"base", b"new code!"])
    (tmp_path / "index.json").write_text(json.dumps({"manifests": [before, after]}))
    layouts.keep_newest(tmp_path)
    found = layouts.image(tmp_path)
    assert (found.name, found.bytes, found.labels) == ("moejob-operator:2", 13, {"a": "moejob-operator:2"})
    kept = {blob.read_bytes() for blob in (tmp_path / "blobs" / "sha256").iterdir()}
    assert {b"base", b"new code!"} <= kept
    assert b"old code" not in kept
    assert len(kept) == 4


def test_containerd_is_told_the_full_name(tmp_path: Path) -> None:
    image = entry(tmp_path, "moejob-operator:1", [b"base"])
    (tmp_path / "index.json").write_text(json.dumps({"manifests": [image]}))
    layouts.keep_newest(tmp_path)
    [kept] = json.loads((tmp_path / "index.json").read_text())["manifests"]
    assert kept["annotations"]["io.containerd.image.name"] == "docker.io/library/moejob-operator:1"


@pytest.mark.parametrize(
    ("name", "full"),
    [
        pytest.param("moejob-operator:1", "docker.io/library/moejob-operator:1", id="bare"),
        pytest.param("ml/moejob-operator:1", "docker.io/ml/moejob-operator:1", id="of a user"),
        pytest.param("registry.example.com/a:1", "registry.example.com/a:1", id="of a registry"),
        pytest.param("registry:5000/a:1", "registry:5000/a:1", id="of a port"),
        pytest.param("localhost/a:1", "localhost/a:1", id="of this machine"),
    ],
)
def test_a_name_without_a_registry_is_of_the_one_that_everybody_means(name: str, full: str) -> None:
    assert layouts.full_name(name) == full


def test_a_layer_that_is_put_is_held(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"layer").hexdigest()
    (tmp_path / digest).write_bytes(b"layer")
    assert not layouts.holds(tmp_path / "layout", [f"sha256:{digest}"])
    layouts.put(tmp_path / "layout", tmp_path / digest)
    assert layouts.holds(tmp_path / "layout", [f"sha256:{digest}"])
