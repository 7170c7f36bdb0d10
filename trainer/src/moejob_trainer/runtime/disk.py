"""The few operations that change a volume, each one system call or nearly so, and what their failures mean.

Every file that a later start or a user trusts is written here, which tests/builds/test_durable_writes.py enforces: a
name that survives a loss of power without its content is an empty file. So the order is always file, folder, rename,
parent, for a file and for a folder alike; a log of lines is cut behind its last whole line, and synced.
Knows nothing of checkpoints. Tests stop the program between any two of these operations.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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


class ChangedContent(OSError):
    """A file was read back from storage with other bytes than were written."""


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

    def write_blocks(self, path: Path, blocks: Iterable[memoryview]) -> None:
        """Write a whole file of many bytes, of which only a block at a time need be in memory a second time."""
        with path.open("wb", buffering=0) as file:
            for block in blocks:
                written_bytes = 0
                # A call writes 2 GiB at most, and less where the volume is almost full.
                while written_bytes < len(block):
                    written_bytes += file.write(block[written_bytes:])

    def append(self, path: Path, content: bytes) -> None:
        """Add to the end of a log of lines, which is made if need be, for its user alone."""
        descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
        try:
            while content:
                content = content[os.write(descriptor, content) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

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


def replace_file(disk: Disk, path: Path, content: bytes) -> None:
    """Write a file so that at any moment, power lost or not, either nothing or all of it has the name."""
    temporary = path.with_name(TEMPORARY + path.name)
    disk.write(temporary, content)
    publish_file(disk, temporary, path)


def publish_file(disk: Disk, unfinished: Path, path: Path) -> None:
    """Give a finished file its name, so that after a loss of power it is whole or absent."""
    disk.sync(unfinished)
    disk.rename(unfinished, path)
    disk.sync(path.parent)


def write_lines(disk: Disk, path: Path, lines: Sequence[str]) -> None:
    """Write a file of lines into a folder of the run folder, which is made if need be."""
    with explain_failure("writing answers", path):
        disk.make_folder(path.parent)
        replace_file(disk, path, "".join(f"{line}\n" for line in lines).encode())
        disk.sync(path.parent.parent)


def sync_tree(disk: Disk, folder: Path) -> None:
    """Make all files of a folder, and all names in it, survive a loss of power."""
    for parent, _, files in os.walk(folder, topdown=False):
        for path in (Path(parent, name) for name in files):
            if not path.is_symlink():
                disk.sync(path)
        disk.sync(Path(parent))


def is_small_file(path: Path) -> bool:
    """Return whether a file of a model holds no weights; writers have read weights back already."""
    return path.suffix != ".safetensors"


def publish_folder(
    disk: Disk, unfinished: Path, folder: Path, needs_reading: Callable[[Path], bool] = is_small_file
) -> None:
    """Give a finished folder its name, so that after a loss of power it is whole or absent; then read it back.

    An older folder of that name is there until then; a crash in between leaves one of the two under `.NAME.replaced`.
    ChangedContent when storage returns other bytes; the older folder is then back in its place.
    """
    digests = _file_digests(unfinished, needs_reading)
    sync_tree(disk, unfinished)
    older_folder = folder.with_name(f".{folder.name}.replaced")
    remove_tree(disk, older_folder)
    if folder.exists():
        disk.rename(folder, older_folder)
    disk.rename(unfinished, folder)
    disk.sync(folder.parent)
    try:
        _require_same(folder, digests)
    except OSError:
        disk.rename(folder, unfinished)
        if older_folder.exists():
            disk.rename(older_folder, folder)
        raise
    # A rest of the older folder costs space, and goes with the next publication.
    with suppress(OSError):
        remove_tree(disk, older_folder)


def keep_folder(disk: Disk, folder: Path, write: Callable[[Path], None]) -> None:
    """Make the folder hold what `write` makes. An equal folder of an earlier start stays; any other is replaced."""
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    remove_tree(disk, unfinished)
    unfinished.mkdir(parents=True)
    write(unfinished)
    if not _is_same(folder, unfinished):
        publish_folder(disk, unfinished, folder)
    remove_tree(disk, unfinished)


def cut_half_line(disk: Disk, path: Path) -> bytes:
    """Cut a log of JSON lines behind its last whole line, and return the rest.

    A full disk and a loss of power leave half a line, or a piece that was never written. The next line would be joined
    to it.
    """
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        return b""
    end = len(content)
    while end and not _ends_with_json(content[:end]):
        end = content.rfind(b"\n", 0, end - 1) + 1
    if end < len(content):
        os.truncate(path, end)
        disk.sync(path)
    return content[end:]


def sync_and_forget(path: Path) -> None:
    """Make a file durable and drop it from the page cache: what is read next comes from storage."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    finally:
        os.close(descriptor)


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
def explain_failure(activity: str, path: Path) -> Iterator[None]:
    """Turn a refusal of the volume into words, and into whether trying again can help."""
    try:
        yield
    except OSError as error:
        raise _failure_in_words(error, activity, path) from error


def _failure_in_words(error: OSError, activity: str, path: Path) -> BadConfiguration | TransientFailure:
    problem = f"{activity} failed at {error.filename or path}: {error.strerror or error}"
    fix = _FIXES.get(error.errno or 0)
    if fix is None:
        return TransientFailure(
            f"{problem}; the volume may answer again, the run resumes from the last complete checkpoint"
        )
    return (TransientFailure if error.errno in _PASSING else BadConfiguration)(f"{problem}; {fix}")


def _ends_with_json(lines: bytes) -> bool:
    if not lines.endswith(b"\n"):
        return False
    try:
        json.loads(lines[lines.rfind(b"\n", 0, -1) + 1 :])
    except ValueError:
        return False
    return True


def _file_digests(folder: Path, needs_reading: Callable[[Path], bool]) -> Mapping[str, bytes]:
    """The SHA-256 of the files by their names in the folder."""
    paths = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink() and needs_reading(path))
    return {path.relative_to(folder).as_posix(): _file_digest(path) for path in paths}


def _file_digest(path: Path) -> bytes:
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").digest()


def _require_same(folder: Path, digests: Mapping[str, bytes]) -> None:
    for name, digest in digests.items():
        sync_and_forget(folder / name)
        if _file_digest(folder / name) != digest:
            raise ChangedContent(errno.EIO, "it was read back with other bytes than were written", str(folder / name))


def _is_same(folder: Path, second_folder: Path) -> bool:
    def needs_every_file(_: Path) -> bool:
        return True

    try:
        return folder.is_dir() and _file_digests(folder, needs_every_file) == _file_digests(
            second_folder, needs_every_file
        )
    except OSError:
        return False
