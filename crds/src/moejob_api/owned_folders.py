"""Temporary folders that belong to a living process: it removes them as it ends, and the next start if it was killed.

The owner holds a lock on a file beside the folder, which the kernel gives back however it ends. Process ids would not
do: they are given again, and mean something else in another container. On a file system without locks nothing is swept.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK = ".lock"
_RANDOM_BYTES = 4


def remove_folder(folder: Path) -> None:
    """Remove the folder with all that is in it, as far as that can be."""
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def owned_folder(prefix: str, parent: Path, remove: Callable[[Path], None] = remove_folder) -> Iterator[Path]:
    """A folder of this process alone, removed at the end. Folders of killed owners with this prefix go at once."""
    sweep_orphans(prefix, parent, remove)
    folder, lock = _make_folder(prefix, parent)
    try:
        yield folder
    finally:
        remove(folder)
        _lock_path(folder).unlink(missing_ok=True)
        os.close(lock)


def sweep_orphans(prefix: str, parent: Path, remove: Callable[[Path], None] = remove_folder) -> None:
    """Remove the folders of this prefix whose owners have ended."""
    for path in parent.glob(f"{prefix}*{_LOCK}"):
        # Gone by now, or another user's, whose folder is another's to remove.
        with suppress(OSError):
            _sweep_folder(path, remove)


def _sweep_folder(path: Path, remove: Callable[[Path], None]) -> None:
    lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if os.fstat(lock).st_uid != os.geteuid():
            return
        # It fails where the owner lives.
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if _is_at(lock, path):
            remove(path.with_name(path.name.removesuffix(_LOCK)))
            path.unlink()
    finally:
        os.close(lock)


def _make_folder(prefix: str, parent: Path) -> tuple[Path, int]:
    while True:
        folder = parent / f"{prefix}{secrets.token_hex(_RANDOM_BYTES)}"
        lock = os.open(_lock_path(folder), os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        # A start that sweeps may have taken the file between its making and the lock.
        if _is_at(lock, _lock_path(folder)):
            folder.mkdir(mode=0o700)
            return folder, lock
        os.close(lock)


def _lock_path(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}{_LOCK}")


def _is_at(lock: int, path: Path) -> bool:
    try:
        file_status = path.lstat()
    except FileNotFoundError:
        return False
    return os.path.samestat(file_status, os.fstat(lock))
