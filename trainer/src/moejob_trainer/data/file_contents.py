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
from moejob_trainer.runtime.disk import Disk, replace_file
from moejob_trainer.runtime.read_ahead import read_blocks

# In the folder of prepared data.
HASHED_FILES = "sources.json"
_BLOCK_BYTES = 2**22


class HashedFile(ApiModel):
    """A file whose content was hashed."""

    stamp: Annotated[str, Field(description="Inode, size and times of the file when its content had this hash.")]
    content: Annotated[str, Field(description="Size and hash.")]


class HashedFiles(ApiModel):
    """The files that a run has hashed, by their paths."""

    files: Mapping[str, HashedFile] = {}


def file_stamp(path: Path) -> str:
    """Return the volume's facts about a file: they change whenever the file is written."""
    status = path.stat()
    return f"{status.st_ino} {status.st_size} {status.st_mtime_ns} {status.st_ctime_ns}"


def read_contents(files: Mapping[str, Path], folder: Path) -> str:
    """Return a text that changes with the content or the name of any file. The folder records the hashes."""
    recorded_files = _read_recorded_files(folder)
    with ThreadPoolExecutor(Disk.reads_at_once) as threads:
        current_files = dict(
            zip(
                files,
                threads.map(lambda path: _hash_if_changed(path, recorded_files.get(str(path))), files.values()),
                strict=True,
            )
        )
    all_files = {**recorded_files, **{str(path): current_files[name] for name, path in files.items()}}
    if all_files != recorded_files:
        content = HashedFiles(files=all_files).model_dump_json(by_alias=True, indent=1).encode() + b"\n"
        replace_file(Disk(), folder / HASHED_FILES, content)
    return ";".join(f"{name}:{current_file.content}" for name, current_file in current_files.items())


def _read_recorded_files(folder: Path) -> Mapping[str, HashedFile]:
    try:
        return HashedFiles.model_validate_json((folder / HASHED_FILES).read_bytes()).files
    # Nothing is lost but the time of hashing again.
    except (OSError, ValidationError):
        return {}


def _hash_if_changed(path: Path, recorded_file: HashedFile | None) -> HashedFile:
    # Take the stamp before reading: a write in the meantime changes it.
    stamp = file_stamp(path)
    if recorded_file is not None and recorded_file.stamp == stamp:
        return recorded_file
    digest, size = xxhash.xxh3_128(), 0
    for block in read_blocks(path, _BLOCK_BYTES):
        digest.update(block)
        size += len(block)
    return HashedFile(stamp=stamp, content=f"{size}:{digest.hexdigest()}")
