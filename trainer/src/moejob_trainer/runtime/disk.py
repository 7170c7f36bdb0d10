"""The few operations that change a volume, each one system call or nearly so, and what their failures mean.

Knows nothing of checkpoints. Tests stop the program between any two of these operations.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from moejob_trainer.errors import BadConfiguration, TransientFailure

# A file that is being written and not yet renamed into place begins with this; no checkpoint owns such a file.
TEMPORARY = ".writing-"
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM})
_FIXES = {
    **dict.fromkeys(
        _FULL, "the volume is full; free space on it, or make it larger; a lower checkpoint.keep leaves more"
    ),
    **dict.fromkeys(_FORBIDDEN, "make the folder writable for the user that the pods run as"),
    errno.EROFS: "the volume is mounted read-only; mount it for writing, or name another one in storage",
    errno.ENOTDIR: "a folder is needed there; move away what is in its place",
}
# A kernel mounts a file system read-only when its disk fails, on this node: another node may write.
_PASSING = frozenset({errno.EROFS})
# Of a run folder, which engines and other users of an export reach through.
_OPEN = 0o755


class Disk:
    """The real volume. What is written is durable only once it, and the folder that names it, are synced."""

    # Hashing outruns any disk; several reads are under way at once because networked volumes need that.
    reads_at_once = min(16, 2 * (os.cpu_count() or 1))

    def make_folder(self, path: Path, mode: int = _OPEN) -> None:
        """Create the folder unless it exists; its parent exists. A link is none: it may lead anywhere."""
        try:
            path.mkdir(mode=mode)
        except FileExistsError as error:
            if path.is_symlink() or not path.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, "a file or a link is there", str(path)) from error

    def write(self, path: Path, content: bytes) -> None:
        """Write the whole file."""
        path.write_bytes(content)

    def sync(self, path: Path) -> None:
        """Make a file's content, or a folder's names, survive a loss of power."""
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Give the file its name, all at once, in place of what had it before."""
        source.rename(target)

    def link(self, source: Path, target: Path) -> None:
        """Give the file a second name, or raise FileExistsError: of several processes one succeeds."""
        target.hardlink_to(source)

    def remove(self, path: Path) -> None:
        """Remove the file if it is there."""
        path.unlink(missing_ok=True)

    def remove_folder(self, path: Path) -> None:
        """Remove the empty folder if it is there."""
        with suppress(FileNotFoundError):
            path.rmdir()

    def free_bytes(self, path: Path) -> int:
        """Bytes that may still be written; quotas do not show here."""
        return shutil.disk_usage(path).free


def replace(disk: Disk, path: Path, content: bytes) -> None:
    """Write a file so that at any moment, power lost or not, either nothing or all of it has the name."""
    temporary = path.with_name(TEMPORARY + path.name)
    disk.write(temporary, content)
    disk.sync(temporary)
    disk.rename(temporary, path)
    disk.sync(path.parent)


def remove_tree(disk: Disk, folder: Path) -> None:
    """Remove the folder with all that is in it. Links are removed, never followed."""
    if folder.is_symlink():
        disk.remove(folder)
        return
    for parent, folders, files in os.walk(folder, topdown=False):
        for name in files:
            disk.remove(Path(parent, name))
        for name in folders:
            path = Path(parent, name)
            (disk.remove if path.is_symlink() else disk.remove_folder)(path)
    disk.remove_folder(folder)


@contextmanager
def explained(doing: str, path: Path) -> Iterator[None]:
    """Turn a refusal of the volume into words, and into whether trying again can help."""
    try:
        yield
    except OSError as error:
        raise _in_words(error, doing, path) from error


def _in_words(error: OSError, doing: str, path: Path) -> BadConfiguration | TransientFailure:
    problem = f"{doing} failed at {error.filename or path}: {error.strerror or error}"
    fix = _FIXES.get(error.errno or 0)
    if fix is None:
        return TransientFailure(
            f"{problem}; the volume may answer again, the run resumes from the last complete checkpoint"
        )
    return (TransientFailure if error.errno in _PASSING else BadConfiguration)(f"{problem}; {fix}")
