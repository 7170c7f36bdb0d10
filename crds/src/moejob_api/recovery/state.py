"""The state machine of recovery: actions after failures, and what is kept so that every failure is charged once.

The operator keeps the state in a job's status, `moejob run` in its process; both go through these transitions and none
of their own. restarts.py chooses the rung of the ladder. Here failures that belong to a recovery under way are
parted from new ones, and a rung that cannot hold gives way to a larger one. Knows neither pods, processes nor clocks.

A pod that is replaced, of a gang of three with backoffLimit 6:

    pod 1 fails              ReplacePods(1), spent 1, replacing {1}
    pod 2 fails meanwhile    ReplacePods(2), spent 1, replacing {1, 2}: it stood beside the one being replaced
    all three are ready      replacing {}: the next failure is a new one
    a checkpoint is saved    spent 0
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from moejob_api.job.status import MAX_REPLACED
from moejob_api.recovery.restarts import (
    Failure,
    GiveUp,
    RecoveryAction,
    ReplaceGang,
    ReplacePods,
    RestartBudget,
    RestartRanks,
    recovery_action,
)


@dataclass(frozen=True, slots=True)
class RecoveryState:
    """The state between two failures."""

    budget: RestartBudget
    # Pods being replaced, until the gang is whole and ready again.
    replacing: frozenset[int] = frozenset()
    # Restarts in place of the present pods that were charged. A gang begins with 0: one before the first report is a
    # failure, too. None after a pod was replaced: its peers restart their ranks for it, until all have reported again.
    rank_restarts: int | None = 0
    # The highest step with a reported checkpoint; the checkpoint may be unreadable by now.
    checkpoint_step: int | None = None


@dataclass(frozen=True, slots=True)
class GangReport:
    """The facts about the present gang on which recovery depends."""

    # Number of its pods. Where all are lost, no launcher waits for the new ones.
    nodes: int
    # Pods that ended well: they cannot join the rendezvous with a new pod.
    succeeded: frozenset[int] = frozenset()
    # Restarts in place of all pods together; None unless each of them has reported.
    rank_restarts: int | None = None
    is_ready: bool = False
    # Some gang schedulers keep a pod, and so its name, until the whole gang has ended.
    can_replace_pods: bool = True


@dataclass(frozen=True, slots=True)
class Recovery:
    """The action after failures, and the state after it. An action that continues an earlier action costs nothing."""

    action: RecoveryAction
    state: RecoveryState
    is_continuation: bool = False


def decide_recovery(failures: Sequence[Failure], gang: GangReport, state: RecoveryState) -> Recovery | None:
    """Return the action on everything that failed since the last decision; None when nothing did."""
    action = recovery_action(tuple(failures), state.budget)
    if action is None:
        return None
    is_continuation = _is_continuation(failures, state) and not isinstance(action, GiveUp)
    if is_continuation:
        action = _continuing_action(failures, state)
    action = _feasible_action(action, gang, state)
    return Recovery(action, _state_after_action(action, gang, state, is_continuation=is_continuation), is_continuation)


def state_after_report(gang: GangReport, state: RecoveryState) -> RecoveryState:
    """Return the state after a report without failures: a gang that is ready again ends the recovery under way."""
    if state.replacing and not gang.is_ready:
        # Ranks beside the replaced pod are still being restarted for it: their counts are not known yet.
        return state
    state = replace(state, replacing=frozenset())
    charged_restarts = state.rank_restarts
    if gang.rank_restarts is None or (charged_restarts is not None and charged_restarts <= gang.rank_restarts):
        return state
    return replace(state, rank_restarts=gang.rank_restarts)


def state_after_checkpoint(state: RecoveryState, saved_step: int | None) -> RecoveryState:
    """Return the state after a checkpoint: one of a higher step than any before renews the budget.

    A run whose newest checkpoint is damaged reports an older one, then saves the same step again. That it was there
    once is all that it gets credit for: else a run that damages what it saves would never come to its end.
    """
    highest = state.checkpoint_step
    if saved_step is None or (highest is not None and saved_step <= highest):
        return state
    return replace(state, checkpoint_step=saved_step, budget=state.budget.after_checkpoint())


def _is_continuation(failures: Sequence[Failure], state: RecoveryState) -> bool:
    """Return whether only pods failed that stood beside one being replaced: its peers do not always survive it.

    A pod that has been replaced and fails again is a new failure, and so is any failure once the gang was whole again.
    """
    return bool(state.replacing) and all(
        not failure.pod_alive and failure.pod not in state.replacing and not failure.cause.needs_new_gang
        for failure in failures
    )


def _continuing_action(failures: Sequence[Failure], state: RecoveryState) -> RecoveryAction:
    pods = tuple(failure.pod for failure in failures)
    reason = f"pod {pods[0]} failed with the one being replaced"
    return ReplacePods(pods, 0.0, state.budget.without_pods(pods), reason)


def _feasible_action(action: RecoveryAction, gang: GangReport, state: RecoveryState) -> RecoveryAction:
    """Return the action, or the whole gang's replacement where pods cannot be replaced alone."""
    if not isinstance(action, ReplacePods):
        return action
    replaced_pods = state.replacing | frozenset(action.pods)
    has_running_peers = len(replaced_pods) < gang.nodes and not gang.succeeded - frozenset(action.pods)
    if gang.can_replace_pods and has_running_peers and len(replaced_pods) <= MAX_REPLACED:
        return action
    # No pod is replaced alone, and none is counted so.
    budget = replace(action.budget.with_new_pods(), pods=state.budget.pods)
    return ReplaceGang(action.after_seconds, budget, action.reason)


def _state_after_action(
    action: RecoveryAction, gang: GangReport, state: RecoveryState, *, is_continuation: bool
) -> RecoveryState:
    match action:
        case RestartRanks(budget=budget):
            # The launchers have restarted their ranks already: only the charge is left to be written.
            return replace(state, budget=budget, rank_restarts=gang.rank_restarts)
        case ReplacePods(pods=pods, budget=budget):
            charged_restarts = state.rank_restarts if is_continuation else None
            return replace(
                state, budget=budget, rank_restarts=charged_restarts, replacing=state.replacing | frozenset(pods)
            )
        case ReplaceGang(budget=budget):
            return replace(state, budget=budget, rank_restarts=0, replacing=frozenset())
        case GiveUp():
            return state
