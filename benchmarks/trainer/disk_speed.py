"""Speed of a disk by itself: what saves and loads of checkpoints can reach at best.

Goes past the page cache where the file system allows it. Where it does not, a write counts until it is synced, and a
read begins after the kernel was asked to forget the file; the answer says which of them it was.
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from moejob_trainer.runtime.disk import sync_and_forget

# Large enough for any disk, and a multiple of every block size.
PART_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True)
class DiskSpeed:
    """Bytes a second, one way each, of some files at a time."""

    files: int
    write: float
    read: float
    past_cache: bool

    def as_fields(self) -> dict[str, object]:
        """Return it for a JSON line, in GB/s."""
        return {
            "files": self.files,
            "writeGBps": round(self.write / 1e9, 2),
            "readGBps": round(self.read / 1e9, 2),
            "pastCache": self.past_cache,
        }


def disk_speed(folder: Path, size_bytes: int, files: int) -> DiskSpeed:
    """Write and read files of this size together, and remove them."""
    paths = [folder / f"disk-speed-{number}" for number in range(files)]
    parts = max(1, size_bytes // files // PART_BYTES)
    try:
        write_seconds, past_cache = _together(paths, parts, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        for path in paths:
            sync_and_forget(path)
        read_seconds, _ = _together(paths, parts, os.O_RDONLY)
    finally:
        for path in paths:
            path.unlink(missing_ok=True)
    moved = parts * PART_BYTES * files
    return DiskSpeed(files, moved / write_seconds, moved / read_seconds, past_cache)


def _together(paths: list[Path], parts: int, flags: int) -> tuple[float, bool]:
    begun = time.perf_counter()
    with ThreadPoolExecutor(len(paths)) as threads:
        direct = list(threads.map(lambda path: _move_file(path, parts, flags), paths))
    return time.perf_counter() - begun, all(direct)


def _move_file(path: Path, parts: int, flags: int) -> bool:
    """Write or read a file; return whether it went past the cache."""
    # Direct access needs memory that begins at a page.
    part = mmap.mmap(-1, PART_BYTES)
    with _open_past_cache(path, flags) as (descriptor, is_direct):
        writes = bool(flags & os.O_WRONLY)
        if writes:
            part.write(os.urandom(PART_BYTES))
        for _ in range(parts):
            moved = os.writev(descriptor, [part]) if writes else os.readv(descriptor, [part])
            if moved != PART_BYTES:
                raise OSError(f"{moved} of {PART_BYTES} bytes were moved; make room at {path}")
        if writes:
            os.fsync(descriptor)
    part.close()
    return is_direct


@contextmanager
def _open_past_cache(path: Path, flags: int) -> Iterator[tuple[int, bool]]:
    try:
        descriptor, is_direct = os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError:
        # Such as tmpfs and some overlays.
        descriptor, is_direct = os.open(path, flags, 0o600), False
    try:
        yield descriptor, is_direct
    finally:
        os.close(descriptor)
