"""Verification: finds the newest checkpoint whose marker, manifest and files agree.

Reads only. Under many ranks, rank 0 looks for candidates and decides, and all of them read a share of the files.
"""

from __future__ import annotations

import errno
import time
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from pydantic import TypeAdapter

from moejob_trainer.checkpoints.manifest import Damaged, FileEntry, Manifest, divided, hashed_all, read_manifest
from moejob_trainer.checkpoints.names import MANIFEST, MARKER, REJECTED, StepFolder, step_folder
from moejob_trainer.distributed.coordination import Coordinator, SingleRank, on_all_ranks, on_first_rank
from moejob_trainer.runtime.disk import explained

# Errors of one file that will be the same the next time; other errors are the volume's.
_DAMAGE = frozenset({errno.ENOENT, errno.EISDIR, errno.ENOTDIR})
# Errors of one file that may be gone the next time, or on the next node: they say nothing about its content.
_UNREAD = frozenset({errno.EIO, errno.EUCLEAN})
# Pauses before a checkpoint that cannot be read is read again.
_PAUSES_SECONDS = (0.1, 0.9)
_SHOWN = 5


class VerificationDepth(StrEnum):
    """Depth of the verification of a checkpoint."""

    SIZES = "sizes"
    HASHES = "hashes"


class FolderState(StrEnum):
    """Progress of a checkpoint's folder. Only a complete one may be trusted, and only after a check."""

    PARTIAL = "partial"
    COMPLETE = "complete"
    # Was complete once; its files were found damaged.
    REJECTED = "rejected"
    # Complete, but it cannot be read now: retention neither counts nor deletes it.
    UNREAD = "unread"


@dataclass(frozen=True, slots=True)
class SeenFolder:
    """One checkpoint's folder in a listing."""

    folder: StepFolder
    state: FolderState


@dataclass(frozen=True, slots=True)
class Found:
    """A checkpoint that was checked and is good."""

    path: Path
    folder: StepFolder
    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Refusal:
    """A checkpoint that was complete once and is not trusted: it is damaged, or it cannot be read now."""

    folder: StepFolder
    reason: str
    is_unread: bool = False

    def __str__(self) -> str:
        return f"{self.folder.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class Search:
    """A good checkpoint, if there is one, and the newer ones that were refused, newest first."""

    found: Found | None
    refused: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True)
class Complaint:
    """One file of a checkpoint that is wrong, or could not be read."""

    text: str
    is_unread: bool = False


_SEEN = TypeAdapter(list[SeenFolder])
_OUTCOME: TypeAdapter[Found | Refusal] = TypeAdapter(Found | Refusal)
_REFUSAL: TypeAdapter[Refusal | None] = TypeAdapter(Refusal | None)
_COMPLAINTS = TypeAdapter(list[Complaint])


def seen(checkpoints: Path) -> list[SeenFolder]:
    """List every checkpoint's folder, newest first; none while the run has no folder of checkpoints."""
    with explained("looking for checkpoints", checkpoints):
        if not checkpoints.is_dir():
            return []
        named = ((step_folder(path.name), path) for path in checkpoints.iterdir() if path.is_dir())
        found = [SeenFolder(folder, _state(path)) for folder, path in named if folder is not None]
    return sorted(found, key=lambda one: one.folder, reverse=True)


def has_complete(checkpoints: Path) -> bool:
    """Return whether a checkpoint here was completed; its files are not checked."""
    return any(one.state is FolderState.COMPLETE for one in seen(checkpoints))


def latest(
    checkpoints: Path, check: VerificationDepth = VerificationDepth.HASHES, ranks: Coordinator | None = None
) -> Search:
    """Find the newest good checkpoint. Every rank calls this and gets the same result."""
    refused: list[Refusal] = []
    coordinator = ranks or SingleRank()
    for one in on_first_rank(coordinator, lambda: seen(checkpoints), _SEEN):
        outcome = _refusal(one) or checked(checkpoints / one.folder.name, check, coordinator)
        if isinstance(outcome, Found):
            return Search(outcome, tuple(refused))
        if one.state is not FolderState.PARTIAL:
            refused.append(outcome)
    return Search(None, tuple(refused))


def checked(
    path: Path, check: VerificationDepth = VerificationDepth.HASHES, ranks: Coordinator | None = None
) -> Found | Refusal:
    """Return the checkpoint in this folder, or its refusal. Every rank calls this and gets the same result."""
    coordinator = ranks or SingleRank()
    for pause_seconds in _PAUSES_SECONDS:
        outcome = _checked(path, check, coordinator)
        if isinstance(outcome, Found) or not outcome.is_unread:
            return outcome
        time.sleep(pause_seconds)
    return _checked(path, check, coordinator)


def _checked(path: Path, check: VerificationDepth, coordinator: Coordinator) -> Found | Refusal:
    outcome = on_first_rank(coordinator, lambda: _opened(path), _OUTCOME)
    if isinstance(outcome, Refusal) or check is VerificationDepth.SIZES:
        return outcome
    share = divided(outcome.manifest.files, coordinator.size)[coordinator.rank]
    complaints = on_all_ranks(coordinator, lambda: _hash_complaints(path, share), _COMPLAINTS)
    found = [one for some in complaints for one in some]
    refusal = on_first_rank(coordinator, lambda: _refused(outcome.folder, found), _REFUSAL)
    return refusal or outcome


def _state(path: Path) -> FolderState:
    if (path / MARKER).exists():
        return FolderState.COMPLETE
    return FolderState.REJECTED if (path / REJECTED).exists() else FolderState.PARTIAL


def _refusal(one: SeenFolder) -> Refusal | None:
    match one.state:
        case FolderState.COMPLETE | FolderState.UNREAD:
            return None
        case FolderState.PARTIAL:
            return Refusal(one.folder, f"was never completed: it has no {MARKER}")
        case FolderState.REJECTED:
            return Refusal(one.folder, f"was found damaged before: {MARKER} has become {REJECTED}")


def _opened(path: Path) -> Found | Refusal:
    """Check quickly: marker and manifest match, and every file has its size."""
    folder = step_folder(path.name)
    if folder is None:
        raise ValueError(f"{path} is not named like a checkpoint")
    try:
        manifest = read_manifest(path)
    except Damaged as error:
        return Refusal(folder, str(error))
    except OSError as error:
        return _refusal_of(folder, [_damage(error, path / MANIFEST)])
    if manifest.facts.folder != folder:
        return Refusal(folder, f"its manifest is that of {manifest.facts.folder.name}; give it this name again")
    return _refused(folder, _size_complaints(path, manifest)) or Found(path, folder, manifest)


def _size_complaints(path: Path, manifest: Manifest) -> list[Complaint]:
    return [complaint for entry in manifest.files if (complaint := _size_complaint(path, entry)) is not None]


def _size_complaint(path: Path, entry: FileEntry) -> Complaint | None:
    try:
        size = (path / entry.name).stat().st_size
    except OSError as error:
        return _damage(error, path / entry.name)
    if size == entry.size_bytes:
        return None
    return Complaint(f"{entry.name} has {size} bytes instead of {entry.size_bytes}")


def _hash_complaints(path: Path, share: list[FileEntry]) -> list[Complaint]:
    found = hashed_all(path, [entry.name for entry in share])
    compared = zip(share, found, strict=True)
    return [complaint for entry, lies in compared if (complaint := _hash_complaint(path, entry, lies)) is not None]


def _hash_complaint(path: Path, entry: FileEntry, lies: FileEntry | OSError) -> Complaint | None:
    if isinstance(lies, OSError):
        return _damage(lies, path / entry.name)
    return None if lies == entry else Complaint(f"{entry.name} has hash {lies.hash} instead of {entry.hash}")


def _damage(error: OSError, path: Path) -> Complaint:
    """Return the complaint about one file; raise where the volume fails, which says nothing about the file."""
    if error.errno in _DAMAGE | _UNREAD:
        text = f"{Path(error.filename or path).name} cannot be read: {error.strerror}"
        return Complaint(text, is_unread=error.errno in _UNREAD)
    with explained("checking a checkpoint", path):
        raise error


def _refused(folder: StepFolder, complaints: list[Complaint]) -> Refusal | None:
    return _refusal_of(folder, complaints) if complaints else None


def _refusal_of(folder: StepFolder, complaints: list[Complaint]) -> Refusal:
    more = f" and {len(complaints) - _SHOWN} more" if len(complaints) > _SHOWN else ""
    reason = "; ".join(one.text for one in complaints[:_SHOWN]) + more
    # One file that was read and is wrong proves the damage.
    return Refusal(folder, reason, is_unread=all(one.is_unread for one in complaints))
