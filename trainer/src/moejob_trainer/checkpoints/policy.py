"""Decisions when to save and what to delete, and the check for room on the volume. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from pathlib import Path

from moejob_api.job.evaluations import is_lower_better
from moejob_api.job.storage import Checkpoint
from moejob_api.quantities import readable_bytes
from moejob_trainer.checkpoints.manifest import CheckpointFacts
from moejob_trainer.checkpoints.names import StepFolder
from moejob_trainer.checkpoints.verification import FolderState, ListedFolder
from moejob_trainer.runtime.fencing import FenceToken

DEFAULT_MINUTES = 30.0


@dataclass(frozen=True, slots=True)
class LastSave:
    """The last time the state was safe: at a save, or when this process started."""

    step: int
    at_seconds: float


def is_interval_over(step: int, now_seconds: float, policy: Checkpoint, last: LastSave) -> bool:
    """Return whether an interval of the policy ends with this step. Clocks of ranks differ: let one answer for all."""
    if step <= last.step:
        return False
    if policy.every_steps is not None:
        return step % policy.every_steps == 0
    minutes = DEFAULT_MINUTES if policy.every_minutes is None else policy.every_minutes
    return now_seconds - last.at_seconds >= minutes * 60


def folders_to_delete(
    folders: Sequence[ListedFolder], keep: int, our_token: FenceToken, spared: AbstractSet[StepFolder] = frozenset()
) -> list[StepFolder]:
    """Return the folders to delete, oldest first. A later start's folders are left to that start."""
    complete = sorted((listed.folder for listed in folders if listed.state is FolderState.COMPLETE), reverse=True)
    kept_folders = {*complete[: max(keep, 1)], *spared}
    old = (listed for listed in folders if listed.folder not in kept_folders and listed.folder.token <= our_token)
    return sorted(listed.folder for listed in old if _is_deletable(listed, complete, our_token))


def best_folders(facts: Iterable[CheckpointFacts], measure: str, count: int) -> list[StepFolder]:
    """Return the checkpoints with the best evaluations, best first; of equals the earlier step comes first.

    A step that two starts saved counts once, as the later start saved it. Evaluations by another measure do not count.
    """
    facts_by_step = {
        facts_of_step.step: facts_of_step for facts_of_step in sorted(facts, key=lambda saved: saved.folder)
    }
    comparable = [
        saved
        for saved in facts_by_step.values()
        if saved.evaluation is not None and saved.evaluation.measure == measure
    ]
    return [saved.folder for saved in sorted(comparable, key=lambda saved: (_ranking_value(saved), saved.step))[:count]]


def _ranking_value(facts: CheckpointFacts) -> float:
    if facts.evaluation is None:
        return math.inf
    return facts.evaluation.value if is_lower_better(facts.evaluation.measure) else -facts.evaluation.value


def _is_deletable(listed: ListedFolder, complete: Sequence[StepFolder], our_token: FenceToken) -> bool:
    match listed.state:
        case FolderState.COMPLETE:
            return True
        case FolderState.PARTIAL:
            # An earlier start's is a remnant; this start's may be the save that is under way.
            return listed.folder.token < our_token
        case FolderState.UNREAD:
            return False
        case FolderState.REJECTED:
            # Until a complete checkpoint reaches its step, it may be all that is left of these steps.
            return bool(complete) and complete[0].step >= listed.folder.step


def room_complaint(free_bytes: int, needed_bytes: int, keep: int, path: Path) -> str | None:
    """Return the complaint that a checkpoint would not fit, with the fix; None when it fits."""
    if needed_bytes <= free_bytes:
        return None
    advice = f"; a lower checkpoint.keep (now {keep}) leaves more" if keep > 1 else ""
    return (
        f"a checkpoint takes {readable_bytes(needed_bytes)} and {path} has {readable_bytes(free_bytes)} left; "
        f"free {readable_bytes(needed_bytes - free_bytes)} on the volume, or make it so much larger{advice}"
    )


def start_complaint(free_bytes: int, checkpoint_bytes: int, export_bytes: int, path: Path) -> str | None:
    """Return the complaint that not even one checkpoint and the export would fit, with the fix; None when they do."""
    needed_bytes = checkpoint_bytes + export_bytes
    if needed_bytes <= free_bytes:
        return None
    export = f" and the export {readable_bytes(export_bytes)}" if export_bytes else ""
    return (
        f"a checkpoint takes {readable_bytes(checkpoint_bytes)}{export}, and {path} has {readable_bytes(free_bytes)} "
        f"left; free {readable_bytes(needed_bytes - free_bytes)} on the volume, or make it so much larger"
    )
