"""Which checkpoint can be trusted: the newest whose marker, manifest and files agree.

Reads only. Under many ranks, rank 0 looks for candidates and decides, and all of them read a share of the files.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from moejob_trainer.checkpoints.disk import explained
from moejob_trainer.checkpoints.manifest import Damaged, Entry, Manifest, divided, hashed_all, read_manifest
from moejob_trainer.checkpoints.names import MARKER, REJECTED, StepFolder, step_folder
from moejob_trainer.checkpoints.ranks import Alone, Ranks, decided, everyone

# Failures that belong to one file and will be the same the next time; others are the volume's.
_DAMAGE = frozenset({errno.ENOENT, errno.EIO, errno.EISDIR, errno.ENOTDIR, errno.EUCLEAN})
_SHOWN = 5


class Check(StrEnum):
    """How far a checkpoint is checked."""

    SIZES = "sizes"
    HASHES = "hashes"


class State(StrEnum):
    """How far a checkpoint's folder got. Only a complete one may be trusted, and only after a check."""

    PARTIAL = "partial"
    COMPLETE = "complete"
    # Was complete once; its files were found damaged.
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Seen:
    """One checkpoint's folder as it was found."""

    folder: StepFolder
    state: State


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that was checked and is good."""

    path: Path
    folder: StepFolder
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Refusal:
    """A checkpoint that was once complete and is not trusted."""

    folder: StepFolder
    reason: str

    def __str__(self) -> str:
        return f"{self.folder.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Search:
    """What was found, and what was newer and refused, the newest first."""

    found: Found | None
    refused: tuple[Refusal, ...] = ()


def seen(checkpoints: Path) -> list[Seen]:
    """Every checkpoint's folder, the newest first; nothing when there is no such folder yet."""
    with explained("looking for checkpoints", checkpoints):
        if not checkpoints.is_dir():
            return []
        named = ((step_folder(path.name), path) for path in checkpoints.iterdir() if path.is_dir())
        found = [Seen(folder, _state(path)) for folder, path in named if folder is not None]
    return sorted(found, key=lambda one: one.folder, reverse=True)


def latest(checkpoints: Path, check: Check = Check.HASHES, ranks: Ranks | None = None) -> Search:
    """The newest good checkpoint. Every rank calls this and gets the same answer."""
    refused: list[Refusal] = []
    everybody = ranks or Alone()
    for one in decided(everybody, lambda: seen(checkpoints)):
        outcome = _refusal(one) or checked(checkpoints / one.folder.name, check, everybody)
        if isinstance(outcome, Found):
            return Search(outcome, tuple(refused))
        if one.state is not State.PARTIAL:
            refused.append(outcome)
    return Search(None, tuple(refused))


def checked(path: Path, check: Check = Check.HASHES, ranks: Ranks | None = None) -> Found | Refusal:
    """The checkpoint in this folder, or why it is not good. Every rank calls this and gets the same answer."""
    everybody = ranks or Alone()
    outcome = decided(everybody, lambda: _opened(path))
    if isinstance(outcome, Refusal) or check is Check.SIZES:
        return outcome
    share = divided(outcome.manifest.files, everybody.size)[everybody.rank]
    complaints = everyone(everybody, lambda: _hash_complaints(path, share))
    refusal = decided(everybody, lambda: _refused(outcome.folder, [one for some in complaints for one in some]))
    return refusal or outcome


def _state(path: Path) -> State:
    if (path / MARKER).exists():
        return State.COMPLETE
    return State.REJECTED if (path / REJECTED).exists() else State.PARTIAL


def _refusal(one: Seen) -> Refusal | None:
    match one.state:
        case State.COMPLETE:
            return None
        case State.PARTIAL:
            return Refusal(one.folder, f"was never completed: it has no {MARKER}")
        case State.REJECTED:
            return Refusal(one.folder, f"was found damaged before: {MARKER} has become {REJECTED}")


def _opened(path: Path) -> Found | Refusal:
    """The quick check: marker and manifest belong together, and every file is there in its size."""
    folder = step_folder(path.name)
    if folder is None:
        raise ValueError(f"{path} is not named like a checkpoint")
    try:
        manifest = read_manifest(path)
    except Damaged as error:
        return Refusal(folder, str(error))
    except OSError as error:
        return Refusal(folder, _damage(error, path))
    if manifest.facts.folder != folder:
        return Refusal(folder, f"its manifest is that of {manifest.facts.folder.name}; give it this name again")
    return _refused(folder, _size_complaints(path, manifest)) or Found(path, folder, manifest)


def _size_complaints(path: Path, manifest: Manifest) -> list[str]:
    return [complaint for entry in manifest.files if (complaint := _size_complaint(path, entry)) is not None]


def _size_complaint(path: Path, entry: Entry) -> str | None:
    try:
        size = (path / entry.name).stat().st_size
    except OSError as error:
        return _damage(error, path / entry.name)
    return None if size == entry.size_bytes else f"{entry.name} has {size} bytes instead of {entry.size_bytes}"


def _hash_complaints(path: Path, share: list[Entry]) -> list[str]:
    found = hashed_all(path, [entry.name for entry in share])
    compared = zip(share, found, strict=True)
    return [complaint for entry, lies in compared if (complaint := _hash_complaint(path, entry, lies)) is not None]


def _hash_complaint(path: Path, entry: Entry, lies: Entry | OSError) -> str | None:
    if isinstance(lies, OSError):
        return _damage(lies, path / entry.name)
    return None if lies == entry else f"{entry.name} has hash {lies.hash} instead of {entry.hash}"


def _damage(error: OSError, path: Path) -> str:
    """The complaint about one file; when it is the volume that fails, nothing is known about the file."""
    if error.errno in _DAMAGE:
        return f"{Path(error.filename or path).name} cannot be read: {error.strerror}"
    with explained("checking a checkpoint", path):
        raise error


def _refused(folder: StepFolder, complaints: list[str]) -> Refusal | None:
    if not complaints:
        return None
    more = f" and {len(complaints) - _SHOWN} more" if len(complaints) > _SHOWN else ""
    return Refusal(folder, "; ".join(complaints[:_SHOWN]) + more)
