"""Nodes get from the registry what an archive or a folder holds, byte for byte, and nothing else."""

from __future__ import annotations

import hashlib
import json
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cluster.nodes.images import write_small_image
from cluster.nodes.registry import Registry, whole_name


@pytest.fixture
def registry() -> Iterator[Registry]:
    """An empty one."""
    made = Registry("127.0.0.1")
    made.start()
    yield made
    made.stop()


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    """An image with one file."""
    program = tmp_path / "program"
    program.write_bytes(b"#!/bin/true\n" * 1000)
    return write_small_image(
        tmp_path / "image.tar", {"bin/program": program}, {"bin/link": "program"}, ["/bin/program"]
    )


def get_response(registry: Registry, path: str) -> bytes:
    with urllib.request.urlopen(f"{registry.url}/v2/{path}") as answer:  # noqa: S310
        content: bytes = answer.read()
        return content


def compute_digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


@pytest.mark.parametrize("is_folder", [False, True], ids=["archive", "folder"])
def test_every_piece_of_an_image_is_what_its_digest_says(
    registry: Registry, archive: Path, tmp_path: Path, is_folder: bool
) -> None:
    if is_folder:
        with tarfile.open(archive) as packed:
            packed.extractall(tmp_path / "folder", filter="data")
    registry.add_image("moejob.test/image:1", tmp_path / "folder" if is_folder else archive)
    manifest: dict[str, Any] = json.loads(get_response(registry, "image/manifests/1"))
    for piece in (manifest["config"], *manifest["layers"]):
        content = get_response(registry, f"image/blobs/{piece['digest']}")
        assert (compute_digest(content), len(content)) == (piece["digest"], piece["size"])


def test_a_manifest_is_found_by_tag_and_by_digest(registry: Registry, archive: Path) -> None:
    registry.add_image("moejob-trainer:0.1", archive)
    by_tag = get_response(registry, "library/moejob-trainer/manifests/0.1")
    assert get_response(registry, f"library/moejob-trainer/manifests/{compute_digest(by_tag)}") == by_tag


@pytest.mark.parametrize(
    "path",
    [
        "library/other/manifests/0.1",
        "library/moejob-trainer/manifests/0.2",
        f"x/blobs/{compute_digest(b'')}",
        "x/tags/list",
    ],
)
def test_what_is_not_there_is_not_found(registry: Registry, archive: Path, path: str) -> None:
    registry.add_image("moejob-trainer:0.1", archive)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get_response(registry, path)


@pytest.mark.parametrize(
    ("name", "whole"),
    [
        ("moejob-trainer:1", "docker.io/library/moejob-trainer:1"),
        ("someone/image:1", "docker.io/someone/image:1"),
        ("registry.example.com/ml/image:1", "registry.example.com/ml/image:1"),
        ("localhost:5000/image:1", "localhost:5000/image:1"),
    ],
)
def test_a_name_is_read_as_runtimes_read_it(name: str, whole: str) -> None:
    assert whole_name(name) == whole
