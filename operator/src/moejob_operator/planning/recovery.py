"""From failures to the next state of a job: the action that moejob_api.recovery chooses, written as a decision.

This module adds reasons, names and times, and acts on nothing: a later reconcile reads the written status.
"""

from __future__ import annotations

from typing import assert_never

from moejob_api.job.lifecycle import Gang
from moejob_api.job.status import LastFailure, Phase, Restarts
from moejob_api.recovery.restarts import Cause, GiveUp, ReplaceGang, ReplacePods, RestartRanks, culprit
from moejob_api.recovery.state import GangReport, Recovery, recover
from moejob_operator.observed import PodPhase
from moejob_operator.planning.decision import Decision, Reason
from moejob_operator.planning.failures import Loss, loss_of_ranks, rank_restarts
from moejob_operator.planning.objects import answered_pods
from moejob_operator.planning.observed_state import ObservedState, gang_of, spec_and_layout
from moejob_operator.planning.recovery_state import fresh_gang, recovery_state, with_state
from moejob_operator.planning.timestamps import later, written


def recovery(s: ObservedState, lost: tuple[Loss, ...]) -> Decision:
    """Decide about everything that failed since the last decision. Only recorded here, acted upon later."""
    spec, _ = spec_and_layout(s)
    state = recovery_state(s.restarts, spec.lifecycle.backoff_limit)
    found = recover([loss.failure for loss in lost], gang_report(s), state)
    if found is None:
        raise AssertionError("recovery was asked for without a failure")
    action = found.action
    match action:
        case GiveUp(reason=reason):
            failure = _last_failure(s, lost)
            return Decision(Phase.FAILED, _final_reason(lost), reason, failure=failure, needs_live=True)
        case RestartRanks():
            return _ranks_restarted(s, found, lost)
        case ReplacePods():
            return _pods_replaced(s, found, lost)
        case ReplaceGang():
            return _gang_replaced(s, found, lost)
        case _:
            assert_never(action)


def gang_report(s: ObservedState) -> GangReport:
    """Return the facts about the present gang on which recovery depends."""
    return GangReport(
        succeeded=frozenset(index for index, pod in s.trainers.items() if pod.phase is PodPhase.SUCCEEDED),
        rank_restarts=rank_restarts(s),
        is_ready=s.gang_runs
        and not answered_pods(s)
        and all(pod.is_ready or pod.phase is PodPhase.SUCCEEDED for pod in s.trainers.values()),
        # Kueue keeps a pod of a group, and so its name, until the whole group has ended.
        can_replace_pods=gang_of(s) is not Gang.KUEUE,
    )


# --- rungs ------------------------------------------------------------------------------------------------------------


def _ranks_restarted(s: ObservedState, found: Recovery, lost: tuple[Loss, ...]) -> Decision:
    """Write the charge: the launcher has restarted its ranks already."""
    more = (found.state.rank_restarts or 0) - (s.ladder.rank_restarts or 0)
    restarts = with_state(s.restarts, found.state)
    return Decision(
        Phase.RUNNING,
        Reason.ALL_PODS_RUN,
        found.action.reason,
        restarts=restarts.model_copy(update={"ranks": s.restarts.ranks + max(1, more)}),
        failure=_last_failure(s, lost),
        pods_created=True,
        requeue_after_seconds=0.0,
    )


def _pods_replaced(s: ObservedState, found: Recovery, lost: tuple[Loss, ...]) -> Decision:
    uids = {loss.failure.pod: "" if loss.pod is None else loss.pod.uid for loss in lost}
    restarts = with_state(s.restarts, found.state, uids)
    return Decision(
        Phase.RESTARTING,
        Reason.PODS_REPLACED,
        _reason(found, lost),
        restarts=restarts.model_copy(
            update={
                "pods": s.restarts.pods + len(lost),
                "ladder": restarts.ladder.model_copy(update={"start_after": _start_after(s, found)}),
            }
        ),
        failure=None if found.continues else _last_failure(s, lost),
        needs_live=True,
        requeue_after_seconds=0.0,
    )


def _gang_replaced(s: ObservedState, found: Recovery, lost: tuple[Loss, ...]) -> Decision:
    """The next attempt. Written before anything is deleted: a crash in between must not refund the restart."""
    restarts = fresh_gang(with_state(s.restarts, found.state))
    return Decision(
        Phase.RESTARTING,
        Reason.GANG_RESTARTED,
        _reason(found, lost),
        attempt=s.attempt + 1,
        restarts=restarts.model_copy(
            update={
                "total": s.restarts.total + 1,
                "ladder": restarts.ladder.model_copy(update={"start_after": _start_after(s, found)}),
            }
        ),
        failure=None if found.continues else _last_failure(s, lost),
        needs_live=True,
        requeue_after_seconds=0.0,
    )


def _start_after(s: ObservedState, found: Recovery) -> str:
    """Return when pods may be created: a recovery that continues waits no longer than the one before it."""
    if found.continues:
        return max(s.ladder.start_after or "", written(s.now))
    delay = 0.0 if isinstance(found.action, GiveUp) else found.action.after_seconds
    return later(s.now, delay)


def _reason(found: Recovery, lost: tuple[Loss, ...]) -> str:
    if not found.continues:
        return found.action.reason
    return f"{', '.join(loss.name for loss in lost)} failed with the pod being replaced"


def last_restarts(s: ObservedState) -> tuple[Restarts, LastFailure | None]:
    """Return the restarts with those that only termination messages report: the gang ended before the next poll."""
    if s.ladder.rank_restarts is None:
        # No pod was polled since one was replaced, and that replacement restarted the ranks of the others.
        return s.restarts, None
    words = {index: pod.ended.word for index, pod in s.trainers.items() if pod.ended and pod.ended.word}
    more = sum(word.restarts for word in words.values()) - s.ladder.rank_restarts
    if more <= 0:
        return s.restarts, None
    index = max(words, key=lambda index: words[index].restarts)
    loss = loss_of_ranks(index, s.trainers[index], words[index].fault)
    ladder = s.ladder.model_copy(update={"rank_restarts": s.ladder.rank_restarts + more})
    return s.restarts.model_copy(update={"ranks": s.restarts.ranks + more, "ladder": ladder}), _last_failure(s, (loss,))


def _final_reason(lost: tuple[Loss, ...]) -> Reason:
    is_permanent = any(loss.failure.cause is Cause.BAD_CONFIGURATION for loss in lost)
    return Reason.BAD_CONFIGURATION if is_permanent else Reason.BACKOFF_LIMIT_EXCEEDED


def _last_failure(s: ObservedState, lost: tuple[Loss, ...]) -> LastFailure:
    blamed = culprit(tuple(loss.failure for loss in lost))
    loss = next(loss for loss in lost if loss.failure is blamed)
    return LastFailure(
        time=written(s.now),
        pod=loss.name,
        node=None if loss.pod is None else loss.pod.node,
        rank=loss.rank,
        exit_code=loss.exit_code,
        reason=blamed.cause.value,
        message=blamed.message[:4096],
    )
