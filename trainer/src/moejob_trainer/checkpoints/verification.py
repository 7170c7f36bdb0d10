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

from moejob_trainer.checkpoints.manifest import (
    CheckpointManifest,
    DamagedCheckpoint,
    FileEntry,
    divide_files,
    hash_files,
    read_manifest,
)
from moejob_trainer.checkpoints.names import MANIFEST, MARKER, REJECTED, StepFolder, parse_step_folder
from moejob_trainer.distributed.coordination import Coordinator, SingleRank, run_on_all_ranks, run_on_first_rank
from moejob_trainer.runtime.disk import explain_failure

# Errors of one file that will be the same the next time; other errors are the volume's.
_DAMAGE = frozenset({errno.ENOENT, errno.EISDIR, errno.ENOTDIR})
# Errors of one file that may be gone the next time, or on the next node: they say nothing about its content.
_UNREAD = frozenset({errno.EIO, errno.EUCLEAN})
# Pauses before a checkpoint that cannot be read is read again.
_PAUSES_SECONDS = (0.1, 0.9)
_MOST_SHOWN = 5


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
class ListedFolder:
    """One checkpoint's folder in a listing."""

    folder: StepFolder
    state: FolderState


@dataclass(frozen=True, slots=True)
class GoodCheckpoint:
    """A checkpoint that was checked and is good."""

    path: Path
    folder: StepFolder
    manifest: CheckpointManifest


@dataclass(frozen=True, slots=True)
class Refusal:
    """A checkpoint that was complete once and is not trusted: it is damaged, or it cannot be read now."""

    folder: StepFolder
    reason: str
    is_unread: bool = False

    def __str__(self) -> str:
        return f"{self.folder.name}: {self.reason}"


@dataclass(frozen=True, slots=True)
class CheckpointSearch:
    """A good checkpoint, if there is one, and the newer ones that were refused, newest first."""

    checkpoint: GoodCheckpoint | None
    refusals: tuple[Refusal, ...] = ()


@dataclass(frozen=True, slots=True)
class FileComplaint:
    """One file of a checkpoint that is wrong, or could not be read."""

    text: str
    is_unread: bool = False


_SEEN = TypeAdapter(list[ListedFolder])
_OUTCOME: TypeAdapter[GoodCheckpoint | Refusal] = TypeAdapter(GoodCheckpoint | Refusal)
_REFUSAL: TypeAdapter[Refusal | None] = TypeAdapter(Refusal | None)
_COMPLAINTS = TypeAdapter(list[FileComplaint])


def list_step_folders(checkpoints: Path) -> list[ListedFolder]:
    """List every checkpoint's folder, newest first; none while the run has no folder of checkpoints."""
    with explain_failure("looking for checkpoints", checkpoints):
        if not checkpoints.is_dir():
            return []
        named_paths = ((parse_step_folder(path.name), path) for path in checkpoints.iterdir() if path.is_dir())
        listed_folders = [
            ListedFolder(folder, _folder_state(path)) for folder, path in named_paths if folder is not None
        ]
    return sorted(listed_folders, key=lambda listed: listed.folder, reverse=True)


def has_complete_checkpoint(checkpoints: Path) -> bool:
    """Return whether a checkpoint here was completed; its files are not checked."""
    return any(listed.state is FolderState.COMPLETE for listed in list_step_folders(checkpoints))


def find_latest_checkpoint(
    checkpoints: Path, depth: VerificationDepth = VerificationDepth.HASHES, ranks: Coordinator | None = None
) -> CheckpointSearch:
    """Find the newest good checkpoint. Every rank calls this and gets the same result."""
    refusals: list[Refusal] = []
    coordinator = ranks or SingleRank()
    for listed in run_on_first_rank(coordinator, lambda: list_step_folders(checkpoints), _SEEN):
        outcome = _refusal_of_state(listed) or verify_checkpoint(checkpoints / listed.folder.name, depth, coordinator)
        if isinstance(outcome, GoodCheckpoint):
            return CheckpointSearch(outcome, tuple(refusals))
        if listed.state is not FolderState.PARTIAL:
            refusals.append(outcome)
    return CheckpointSearch(None, tuple(refusals))


def verify_checkpoint(
    path: Path, depth: VerificationDepth = VerificationDepth.HASHES, ranks: Coordinator | None = None
) -> GoodCheckpoint | Refusal:
    """Return the checkpoint in this folder, or its refusal. Every rank calls this and gets the same result."""
    coordinator = ranks or SingleRank()
    for pause_seconds in _PAUSES_SECONDS:
        outcome = _verify_once(path, depth, coordinator)
        if isinstance(outcome, GoodCheckpoint) or not outcome.is_unread:
            return outcome
        time.sleep(pause_seconds)
    return _verify_once(path, depth, coordinator)


def _verify_once(path: Path, depth: VerificationDepth, coordinator: Coordinator) -> GoodCheckpoint | Refusal:
    outcome = run_on_first_rank(coordinator, lambda: _check_sizes(path), _OUTCOME)
    if isinstance(outcome, Refusal) or depth is VerificationDepth.SIZES:
        return outcome
    share = divide_files(outcome.manifest.files, coordinator.size)[coordinator.rank]
    complaints = run_on_all_ranks(coordinator, lambda: _hash_complaints(path, share), _COMPLAINTS)
    all_complaints = [complaint for rank_complaints in complaints for complaint in rank_complaints]
    refusal = run_on_first_rank(coordinator, lambda: _refusal_if_any(outcome.folder, all_complaints), _REFUSAL)
    return refusal or outcome


def _folder_state(path: Path) -> FolderState:
    if (path / MARKER).exists():
        return FolderState.COMPLETE
    return FolderState.REJECTED if (path / REJECTED).exists() else FolderState.PARTIAL


def _refusal_of_state(listed: ListedFolder) -> Refusal | None:
    match listed.state:
        case FolderState.COMPLETE | FolderState.UNREAD:
            return None
        case FolderState.PARTIAL:
            return Refusal(listed.folder, f"was never completed: it has no {MARKER}")
        case FolderState.REJECTED:
            return Refusal(listed.folder, f"was found damaged before: {MARKER} has become {REJECTED}")


def _check_sizes(path: Path) -> GoodCheckpoint | Refusal:
    """Check quickly: marker and manifest match, and every file has its size."""
    folder = parse_step_folder(path.name)
    if folder is None:
        raise ValueError(f"{path} is not named like a checkpoint")
    try:
        manifest = read_manifest(path)
    except DamagedCheckpoint as error:
        return Refusal(folder, str(error))
    except OSError as error:
        return _build_refusal(folder, [_unreadable_complaint(error, path / MANIFEST)])
    if manifest.facts.folder != folder:
        return Refusal(folder, f"its manifest is that of {manifest.facts.folder.name}; give it this name again")
    complaints = [complaint for entry in manifest.files if (complaint := _size_complaint(path, entry)) is not None]
    return _refusal_if_any(folder, complaints) or GoodCheckpoint(path, folder, manifest)


def _size_complaint(path: Path, entry: FileEntry) -> FileComplaint | None:
    try:
        size = (path / entry.name).stat().st_size
    except OSError as error:
        return _unreadable_complaint(error, path / entry.name)
    if size == entry.size_bytes:
        return None
    return FileComplaint(f"{entry.name} has {size} bytes instead of {entry.size_bytes}")


def _hash_complaints(path: Path, share: list[FileEntry]) -> list[FileComplaint]:
    entries_on_disk = hash_files(path, [entry.name for entry in share])
    compared = zip(share, entries_on_disk, strict=True)
    return [
        complaint for entry, on_disk in compared if (complaint := _hash_complaint(path, entry, on_disk)) is not None
    ]


def _hash_complaint(path: Path, entry: FileEntry, on_disk: FileEntry | OSError) -> FileComplaint | None:
    if isinstance(on_disk, OSError):
        return _unreadable_complaint(on_disk, path / entry.name)
    return None if on_disk == entry else FileComplaint(f"{entry.name} has hash {on_disk.hash} instead of {entry.hash}")


def _unreadable_complaint(error: OSError, path: Path) -> FileComplaint:
    """Return the complaint about one file; raise where the volume fails, which says nothing about the file."""
    if error.errno in _DAMAGE | _UNREAD:
        text = f"{Path(error.filename or path).name} cannot be read: {error.strerror}"
        return FileComplaint(text, is_unread=error.errno in _UNREAD)
    with explain_failure("checking a checkpoint", path):
        raise error


def _refusal_if_any(folder: StepFolder, complaints: list[FileComplaint]) -> Refusal | None:
    return _build_refusal(folder, complaints) if complaints else None


def _build_refusal(folder: StepFolder, complaints: list[FileComplaint]) -> Refusal:
    remainder = f" and {len(complaints) - _MOST_SHOWN} more" if len(complaints) > _MOST_SHOWN else ""
    reason = "; ".join(complaint.text for complaint in complaints[:_MOST_SHOWN]) + remainder
    # One file that was read and is wrong proves the damage.
    return Refusal(folder, reason, is_unread=all(complaint.is_unread for complaint in complaints))
