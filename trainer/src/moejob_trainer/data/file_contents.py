"""Identity of data files: their content, read once, and again only when the volume says that they were written.

A copy, a `touch` or another mount changes the times of a file but not its content. Hashes detect changes here, not
forgery: a user who may write the data may change the training data anyway.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import xxhash
from pydantic import Field, ValidationError

from moejob_api.job.base import ApiModel
from moejob_trainer.runtime.disk import Disk, replace
from moejob_trainer.runtime.read_ahead import blocks

# In the folder of prepared data.
KNOWN_FILES = "sources.json"
_BLOCK_BYTES = 2**22


class KnownFile(ApiModel):
    """A file whose content was hashed."""

    stamp: Annotated[str, Field(description="Inode, size and times of the file when its content had this hash.")]
    content: Annotated[str, Field(description="Size and hash.")]


class KnownFiles(ApiModel):
    """The files that a run has hashed, by their paths."""

    files: Mapping[str, KnownFile] = {}


def file_stamp(path: Path) -> str:
    """Return the volume's facts about a file: they change whenever the file is written."""
    about = path.stat()
    return f"{about.st_ino} {about.st_size} {about.st_mtime_ns} {about.st_ctime_ns}"


def read_contents(files: Mapping[str, Path], folder: Path) -> str:
    """Return a text that changes with the content or the name of any file. The folder records the hashes."""
    known = _known(folder)
    with ThreadPoolExecutor(Disk.reads_at_once) as threads:
        seen = dict(
            zip(files, threads.map(lambda path: _seen(path, known.get(str(path))), files.values()), strict=True)
        )
    now = {**known, **{str(path): seen[name] for name, path in files.items()}}
    if now != known:
        content = KnownFiles(files=now).model_dump_json(by_alias=True, indent=1).encode() + b"\n"
        replace(Disk(), folder / KNOWN_FILES, content)
    return ";".join(f"{name}:{one.content}" for name, one in seen.items())


def _known(folder: Path) -> Mapping[str, KnownFile]:
    try:
        return KnownFiles.model_validate_json((folder / KNOWN_FILES).read_bytes()).files
    # Nothing is lost but the time of hashing again.
    except (OSError, ValidationError):
        return {}


def _seen(path: Path, known: KnownFile | None) -> KnownFile:
    # Take the stamp before reading: a write in the meantime changes it.
    stamp = file_stamp(path)
    if known is not None and known.stamp == stamp:
        return known
    digest, size = xxhash.xxh3_128(), 0
    for block in blocks(path, _BLOCK_BYTES):
        digest.update(block)
        size += len(block)
    return KnownFile(stamp=stamp, content=f"{size}:{digest.hexdigest()}")
