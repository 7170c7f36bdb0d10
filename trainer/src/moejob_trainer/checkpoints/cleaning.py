"""Retention: marks damaged checkpoints, deletes old ones and the remains of unfinished saves. Runs on rank 0."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass

from moejob_api.job.storage import Checkpoint
from moejob_trainer.checkpoints.best import facts_in
from moejob_trainer.checkpoints.commit import delete, reject
from moejob_trainer.checkpoints.manifest import Facts
from moejob_trainer.checkpoints.names import MARKER, StepFolder, step_folder
from moejob_trainer.checkpoints.policy import best, to_delete
from moejob_trainer.checkpoints.run import RunFolder, other_run
from moejob_trainer.checkpoints.unread import retry_unread
from moejob_trainer.checkpoints.verification import FolderState, Refusal, Search, SeenFolder, seen
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.runtime.disk import Disk, explained

log = logging.getLogger(__name__)


def set_aside(place: RunFolder, search: Search, disk: Disk) -> None:
    """Mark damaged checkpoints that are newer than the good one; refuse to start over when no good one is left."""
    retry_unread(place, search, disk)
    if search.found is None and search.refused:
        raise BadConfiguration(
            f"{place.checkpoints} has checkpoints and none is good: {'; '.join(map(str, search.refused))}; "
            "bring one back, or move the folder away to begin again"
        )
    for refusal in search.refused:
        log.warning("checkpoint refused", extra={"checkpoint": refusal.folder.name, "reason": refusal.reason})
        if refusal.is_unread:
            continue
        path = place.checkpoints / refusal.folder.name
        with explained("setting a damaged checkpoint aside", path):
            if (path / MARKER).exists():
                place.require_ours("judges checkpoints")
                reject(path, disk)


@dataclass(frozen=True, slots=True)
class Retention:
    """The policy of the job, and the measure by which checkpoints are the best."""

    policy: Checkpoint
    measure: str = ""
    # Checkpoints that could not be read at the start, so that the run resumed from an older one.
    passed_over: AbstractSet[StepFolder] = frozenset()


def clean(place: RunFolder, retention: Retention, disk: Disk) -> None:
    """Delete checkpoints beyond the retention. A failed deletion costs space, which every save checks; never the run.

    A checkpoint counts as kept if all its files have their sizes. Reading every file here would take hours; a run that
    resumes reads them and finds changed bytes.
    """
    counted = [_counted(place, one, retention.passed_over) for one in seen(place.checkpoints)]
    folders, facts = [one.seen for one in counted], [one.facts for one in counted if one.facts is not None]
    spared = _named(place, retention.policy) | _best(facts, retention)
    for folder in to_delete(folders, retention.policy.keep, place.token, spared):
        if not place.is_ours():
            return
        try:
            delete(place.checkpoints / folder.name, disk)
        except OSError as error:
            log.warning("checkpoint not deleted", extra={"checkpoint": folder.name, "reason": str(error)})


@dataclass(frozen=True, slots=True)
class _Counted:
    """A checkpoint's folder as retention counts it, with its facts if they can be read."""

    seen: SeenFolder
    facts: Facts | None = None


def _counted(place: RunFolder, one: SeenFolder, passed_over: AbstractSet[StepFolder]) -> _Counted:
    """Return the folder as retention counts it: a visibly damaged checkpoint takes no place among the kept ones."""
    if one.state is not FolderState.COMPLETE:
        return _Counted(one)
    # The run resumed from an older one: this one is deleted when the run has reached its step again.
    if one.folder in passed_over:
        return _Counted(SeenFolder(one.folder, FolderState.REJECTED))
    found = facts_in(place.checkpoints / one.folder.name)
    if not isinstance(found, Refusal):
        return _Counted(one, found)
    log.warning("checkpoint refused", extra={"checkpoint": one.folder.name, "reason": found.reason})
    return _Counted(SeenFolder(one.folder, FolderState.UNREAD if found.is_unread else FolderState.REJECTED))


def _best(facts: Sequence[Facts], retention: Retention) -> frozenset[StepFolder]:
    return frozenset(best(facts, retention.measure, retention.policy.keep_best or 0))


def _named(place: RunFolder, policy: Checkpoint) -> frozenset[StepFolder]:
    """Return the checkpoint that resumeFrom names, if it is one of this run."""
    if policy.resume_from is None:
        return frozenset()
    named = other_run(policy.resume_from, place.folder)
    folder = step_folder(named.name)
    return frozenset() if folder is None or named.parent != place.checkpoints else frozenset({folder})
