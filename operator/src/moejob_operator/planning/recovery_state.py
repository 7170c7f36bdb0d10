"""The state of recovery in a job's status: read for moejob_api.recovery, and written back. Decides nothing."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from moejob_api.job.status import ReplacedPod, Restarts
from moejob_api.recovery.restarts import RestartBudget
from moejob_api.recovery.state import RecoveryState

_NO_UIDS: Mapping[int, str] = MappingProxyType({})


def recovery_state(restarts: Restarts, backoff_limit: int) -> RecoveryState:
    """Return the state that a status holds."""
    ladder = restarts.ladder
    return RecoveryState(
        budget=RestartBudget(backoff_limit, restarts.since_checkpoint, ladder.in_place, ladder.pods, ladder.uncounted),
        replacing=frozenset(entry.index for entry in ladder.replacing),
        rank_restarts=ladder.rank_restarts,
        checkpoint_step=ladder.checkpoint_step,
    )


def restarts_with_state(restarts: Restarts, state: RecoveryState, uids: Mapping[int, str] = _NO_UIDS) -> Restarts:
    """Return the status' part for a state; `uids` are those of pods that are replaced now, by index."""
    budget, before = state.budget, restarts.ladder
    uids_by_index = {entry.index: entry.uid for entry in before.replacing} | dict(uids)
    ladder = before.model_copy(
        update={
            "in_place": budget.in_place,
            "pods": budget.pods,
            "uncounted": budget.uncounted,
            "rank_restarts": state.rank_restarts,
            "checkpoint_step": state.checkpoint_step,
            "replacing": tuple(ReplacedPod(index=index, uid=uids_by_index[index]) for index in sorted(state.replacing)),
        }
    )
    return restarts.model_copy(
        update={
            "since_checkpoint": budget.spent,
            # A new checkpoint sets uncounted back to 0; preemptions are those of the whole job.
            "preemptions": restarts.preemptions + max(0, budget.uncounted - before.uncounted),
            "ladder": ladder,
        }
    )


def forget_gang(restarts: Restarts) -> Restarts:
    """Return the same budget without any memory of pods: the next gang has other pods, and no restarts yet."""
    cleared = {"in_place": 0, "rank_restarts": 0, "gang_was_whole": False, "replacing": (), "start_after": None}
    return restarts.model_copy(update={"ladder": restarts.ladder.model_copy(update=cleared)})
