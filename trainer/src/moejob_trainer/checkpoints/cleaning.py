"""Retention: marks damaged checkpoints, deletes old ones and the remains of unfinished saves. Runs on rank 0.

Which of the folders are old is decided in policy.py, from the facts and exceptions that are gathered here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from moejob_api.job.storage import Checkpoint
from moejob_trainer.checkpoints.best import read_facts
from moejob_trainer.checkpoints.commit import delete_checkpoint, reject_checkpoint
from moejob_trainer.checkpoints.manifest import CheckpointFacts
from moejob_trainer.checkpoints.names import MARKER, StepFolder, parse_step_folder
from moejob_trainer.checkpoints.policy import best_folders, folders_to_delete
from moejob_trainer.checkpoints.run import RunFolder, resume_folder
from moejob_trainer.checkpoints.unread import retry_unread
from moejob_trainer.checkpoints.verification import (
    CheckpointSearch,
    FolderState,
    ListedFolder,
    Refusal,
    list_step_folders,
)
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.runtime.disk import Disk, explain_failure

log = logging.getLogger(__name__)


def reject_damaged_checkpoints(run_folder: RunFolder, search: CheckpointSearch, disk: Disk) -> None:
    """Mark damaged checkpoints that are newer than the good one; refuse to start over when no good one is left."""
    retry_unread(run_folder, search, disk)
    if search.checkpoint is None and search.refusals:
        raise BadConfiguration(
            f"{run_folder.checkpoints} has checkpoints and none is good: {'; '.join(map(str, search.refusals))}; "
            "bring one back, or move the folder away to begin again"
        )
    for refusal in search.refusals:
        log.warning("checkpoint refused", extra={"checkpoint": refusal.folder.name, "reason": refusal.reason})
        if refusal.is_unread:
            continue
        path = run_folder.checkpoints / refusal.folder.name
        with explain_failure("setting a damaged checkpoint aside", path):
            if (path / MARKER).exists():
                run_folder.require_ours("judges checkpoints")
                reject_checkpoint(path, disk)


@dataclass(frozen=True, slots=True)
class Retention:
    """The policy of the job, and the measure by which checkpoints are the best."""

    policy: Checkpoint
    measure: str = ""
    # Checkpoints that could not be read at the start, so that the run resumed from an older one.
    passed_over: AbstractSet[StepFolder] = frozenset()


def apply_retention(run_folder: RunFolder, retention: Retention, disk: Disk) -> None:
    """Delete checkpoints beyond the retention. A failed deletion costs space, which every save checks; never the run.

    A checkpoint counts as kept if all its files have their sizes. Reading every file here would take hours; a run that
    resumes reads them and finds changed bytes.
    """
    classified_folders = [
        _classify_folder(run_folder, item, retention.passed_over) for item in list_step_folders(run_folder.checkpoints)
    ]
    folders, facts = (
        [classified.listed for classified in classified_folders],
        [classified.facts for classified in classified_folders if classified.facts is not None],
    )
    spared_folders = _resume_source(run_folder, retention.policy) | _best_folders(facts, retention)
    for folder in folders_to_delete(folders, retention.policy.keep, run_folder.token, spared_folders):
        if not run_folder.is_ours():
            return
        try:
            delete_checkpoint(run_folder.checkpoints / folder.name, disk)
        except OSError as error:
            log.warning("checkpoint not deleted", extra={"checkpoint": folder.name, "reason": str(error)})


@dataclass(frozen=True, slots=True)
class _CountedFolder:
    """A checkpoint's folder as retention counts it, with its facts if they can be read."""

    listed: ListedFolder
    facts: CheckpointFacts | None = None


def _classify_folder(
    run_folder: RunFolder, listed: ListedFolder, passed_over: AbstractSet[StepFolder]
) -> _CountedFolder:
    """Return the folder as retention counts it: a visibly damaged checkpoint takes no place among the kept ones."""
    if listed.state is not FolderState.COMPLETE:
        return _CountedFolder(listed)
    # The run resumed from an older one: this one is deleted when the run has reached its step again.
    if listed.folder in passed_over:
        return _CountedFolder(ListedFolder(listed.folder, FolderState.REJECTED))
    facts = read_facts(run_folder.checkpoints / listed.folder.name)
    if not isinstance(facts, Refusal):
        return _CountedFolder(listed, facts)
    log.warning("checkpoint refused", extra={"checkpoint": listed.folder.name, "reason": facts.reason})
    return _CountedFolder(ListedFolder(listed.folder, FolderState.UNREAD if facts.is_unread else FolderState.REJECTED))


def _best_folders(facts: Sequence[CheckpointFacts], retention: Retention) -> frozenset[StepFolder]:
    return frozenset(best_folders(facts, retention.measure, retention.policy.keep_best or 0))


def _resume_source(run_folder: RunFolder, policy: Checkpoint) -> frozenset[StepFolder]:
    """Return the checkpoint that resumeFrom names, if it is one of this run."""
    if policy.resume_from is None:
        return frozenset()
    source = resume_folder(policy.resume_from, run_folder.folder)
    folder = parse_step_folder(source.name)
    return frozenset() if folder is None or source.parent != run_folder.checkpoints else frozenset({folder})
