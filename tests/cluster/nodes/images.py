"""Container images as OCI archives: writes small ones of ours, reads those that others have built."""

from __future__ import annotations

import hashlib
import io
import json
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"
LAYER = "application/vnd.oci.image.layer.v1.tar"
BLOBS = "blobs/sha256/"


@dataclass(frozen=True, slots=True)
class Blob:
    """A piece of an image, where it lies in a file."""

    file: Path
    offset: int
    size: int

    def read(self) -> bytes:
        """All of it: for what is small."""
        with self.file.open("rb") as source:
            source.seek(self.offset)
            return source.read(self.size)


@dataclass(frozen=True, slots=True)
class Image:
    """An image, and everything it may refer to."""

    manifest: str
    media_type: str
    config: str
    blobs: Mapping[str, Blob]


def read_image(path: Path) -> Image:
    """The only image of an OCI archive or folder. Nothing is unpacked: its blobs stay where they are."""
    found = dict(_in_folder(path) if path.is_dir() else _in_archive(path))
    index: dict[str, Any] = json.loads(found["index.json"].read())
    [entry] = index["manifests"]
    blobs = {name.replace(BLOBS, "sha256:"): blob for name, blob in found.items() if name.startswith(BLOBS)}
    manifest: dict[str, Any] = json.loads(blobs[entry["digest"]].read())
    return Image(entry["digest"], entry["mediaType"], manifest["config"]["digest"], blobs)


def _in_folder(folder: Path) -> Iterator[tuple[str, Blob]]:
    for file in folder.rglob("*"):
        if file.is_file():
            yield str(file.relative_to(folder)), Blob(file, 0, file.stat().st_size)


def _in_archive(path: Path) -> Iterator[tuple[str, Blob]]:
    with tarfile.open(path, "r:") as archive:
        for member in archive:
            if member.isfile():
                yield member.name.removeprefix("./"), Blob(path, member.offset_data, member.size)


def write_variant(target: Path, source: Path, changed: Mapping[str, Sequence[str]]) -> Path:
    """A folder with an image that differs from another in what it starts: Entrypoint, Cmd. Layers are shared."""
    image = read_image(source)
    blobs = target / BLOBS
    blobs.mkdir(parents=True)
    for name, blob in image.blobs.items():
        if blob.file.parent.name == "sha256":
            (blobs / name.removeprefix("sha256:")).symlink_to(blob.file)
    config = json.loads(image.blobs[image.config].read())
    config["config"] |= {name: [*words] for name, words in changed.items()}
    manifest = json.loads(image.blobs[image.manifest].read())
    manifest["config"] |= _placed(blobs, _encode_json(config))
    entry = {"mediaType": image.media_type, **_placed(blobs, _encode_json(manifest))}
    (target / "index.json").write_bytes(_encode_json({"schemaVersion": 2, "manifests": [entry]}))
    (target / "oci-layout").write_bytes(_encode_json({"imageLayoutVersion": "1.0.0"}))
    return target


def _placed(blobs: Path, content: bytes) -> dict[str, object]:
    (blobs / _compute_digest(content).removeprefix("sha256:")).write_bytes(content)
    return {"digest": _compute_digest(content), "size": len(content)}


def write_small_image(
    path: Path, files: Mapping[str, Path], links: Mapping[str, str], command: Sequence[str], user: str = ""
) -> Path:
    """An archive of an image of one layer: programs, links to them, and its default command and user."""
    layer = _layer(files, links)
    config = {
        "architecture": "amd64",
        "os": "linux",
        "config": {"Entrypoint": list(command), "Env": ["PATH=/bin"], "User": user},
        "rootfs": {"type": "layers", "diff_ids": [_compute_digest(layer)]},
    }
    blobs = [_encode_json(config), layer]
    manifest = {
        "schemaVersion": 2,
        "mediaType": MANIFEST,
        "config": _build_descriptor(CONFIG, blobs[0]),
        "layers": [_build_descriptor(LAYER, layer)],
    }
    blobs.append(_encode_json(manifest))
    index = {"schemaVersion": 2, "manifests": [_build_descriptor(MANIFEST, blobs[-1])]}
    with tarfile.open(path, "w") as archive:
        _add_file(archive, "oci-layout", _encode_json({"imageLayoutVersion": "1.0.0"}))
        _add_file(archive, "index.json", _encode_json(index))
        for blob in blobs:
            _add_file(archive, BLOBS + _compute_digest(blob).removeprefix("sha256:"), blob)
    return path


def _layer(files: Mapping[str, Path], links: Mapping[str, str]) -> bytes:
    written = io.BytesIO()
    with tarfile.open(fileobj=written, mode="w") as layer:
        for name, source in files.items():
            _add_file(layer, name, source.read_bytes(), mode=0o755)
        for name, target in links.items():
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            layer.addfile(link)
    return written.getvalue()


def _add_file(archive: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    member = tarfile.TarInfo(name)
    member.size, member.mode = len(content), mode
    archive.addfile(member, io.BytesIO(content))


def _build_descriptor(media_type: str, content: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _compute_digest(content), "size": len(content)}


def _compute_digest(content: bytes) -> str:
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def _encode_json(content: object) -> bytes:
    return json.dumps(content, sort_keys=True).encode()
