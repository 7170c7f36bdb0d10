"""Restarts: from failures to new ranks, pods or a new gang, or to the end of the job.

moejob_api.recovery chooses the action and charges it to backoffLimit. This module writes it as a decision, with
reasons, names and times, and acts on nothing: a later reconcile reads the written status. Launchers restart ranks in
place by themselves (moejob_trainer.launcher.ending); here such a restart is only charged.
"""

from __future__ import annotations

from typing import assert_never

from moejob_api.job.lifecycle import GangScheduler
from moejob_api.job.status import LastFailure, Phase, Restarts
from moejob_api.recovery.restarts import FailureCause, GiveUp, ReplaceGang, ReplacePods, RestartRanks, find_culprit
from moejob_api.recovery.state import GangReport, Recovery, decide_recovery
from moejob_operator.observed import PodPhase
from moejob_operator.planning.decision import Decision, Reason
from moejob_operator.planning.failures import FailedPod, count_rank_restarts, pod_of_restarted_ranks
from moejob_operator.planning.objects import charged_pods
from moejob_operator.planning.observed_state import ObservedState, gang_scheduler, spec_and_layout
from moejob_operator.planning.recovery_state import forget_gang, recovery_state, restarts_with_state
from moejob_operator.planning.timestamps import format_time, time_after


def plan_recovery(s: ObservedState, failed_pods: tuple[FailedPod, ...]) -> Decision:
    """Decide about everything that failed since the last decision. Only recorded here, acted upon later."""
    spec, _ = spec_and_layout(s)
    state = recovery_state(s.restarts, spec.lifecycle.backoff_limit)
    recovery = decide_recovery([failed_pod.failure for failed_pod in failed_pods], gang_report(s), state)
    if recovery is None:
        raise AssertionError("recovery was asked for without a failure")
    action = recovery.action
    match action:
        case GiveUp(reason=reason):
            failure = _last_failure(s, failed_pods)
            return Decision(Phase.FAILED, _final_reason(failed_pods), reason, failure=failure, needs_live=True)
        case RestartRanks():
            return _charge_restarted_ranks(s, recovery, failed_pods)
        case ReplacePods():
            return _replace_pods(s, recovery, failed_pods)
        case ReplaceGang():
            return _replace_gang(s, recovery, failed_pods)
        case _:
            assert_never(action)


def gang_report(s: ObservedState) -> GangReport:
    """Return the facts about the present gang on which recovery depends."""
    _, layout = spec_and_layout(s)
    return GangReport(
        # A spare waits for new pods as the others do.
        nodes=max(layout.nodes, len(s.trainers)),
        succeeded=frozenset(index for index, pod in s.trainers.items() if pod.phase is PodPhase.SUCCEEDED),
        rank_restarts=count_rank_restarts(s),
        is_ready=s.is_gang_running
        and not charged_pods(s)
        # A spare is not ready before it has ranks.
        and sum(pod.is_ready or pod.phase is PodPhase.SUCCEEDED for pod in s.trainers.values()) >= layout.nodes,
        # Kueue keeps a pod of a group, and so its name, until the whole group has ended.
        can_replace_pods=gang_scheduler(s) is not GangScheduler.KUEUE,
    )


# --- rungs ------------------------------------------------------------------------------------------------------------


def _charge_restarted_ranks(s: ObservedState, recovery: Recovery, failed_pods: tuple[FailedPod, ...]) -> Decision:
    """Write the charge: the launcher has restarted its ranks already."""
    more = (recovery.state.rank_restarts or 0) - (s.ladder.rank_restarts or 0)
    restarts = restarts_with_state(s.restarts, recovery.state)
    return Decision(
        Phase.RUNNING,
        Reason.ALL_PODS_RUN,
        recovery.action.reason,
        restarts=restarts.model_copy(update={"ranks": s.restarts.ranks + max(1, more)}),
        failure=_last_failure(s, failed_pods),
        pods_created=True,
        requeue_after_seconds=0.0,
    )


def _replace_pods(s: ObservedState, recovery: Recovery, failed_pods: tuple[FailedPod, ...]) -> Decision:
    uids = {failed_pod.failure.pod: "" if failed_pod.pod is None else failed_pod.pod.uid for failed_pod in failed_pods}
    restarts = restarts_with_state(s.restarts, recovery.state, uids)
    return Decision(
        Phase.RESTARTING,
        Reason.PODS_REPLACED,
        _recovery_reason(recovery, failed_pods),
        restarts=restarts.model_copy(
            update={
                "pods": s.restarts.pods + len(failed_pods),
                "ladder": restarts.ladder.model_copy(update={"start_after": _start_after(s, recovery)}),
            }
        ),
        failure=None if recovery.is_continuation else _last_failure(s, failed_pods),
        needs_live=True,
        requeue_after_seconds=0.0,
    )


def _replace_gang(s: ObservedState, recovery: Recovery, failed_pods: tuple[FailedPod, ...]) -> Decision:
    """The next attempt. Written before anything is deleted: a crash in between must not refund the restart."""
    restarts = forget_gang(restarts_with_state(s.restarts, recovery.state))
    return Decision(
        Phase.RESTARTING,
        Reason.GANG_RESTARTED,
        _recovery_reason(recovery, failed_pods),
        attempt=s.attempt + 1,
        restarts=restarts.model_copy(
            update={
                "total": s.restarts.total + 1,
                "ladder": restarts.ladder.model_copy(update={"start_after": _start_after(s, recovery)}),
            }
        ),
        failure=None if recovery.is_continuation else _last_failure(s, failed_pods),
        needs_live=True,
        requeue_after_seconds=0.0,
    )


def _start_after(s: ObservedState, recovery: Recovery) -> str:
    """Return when pods may be created: a recovery that continues waits no longer than the one before it."""
    if recovery.is_continuation:
        return max(s.ladder.start_after or "", format_time(s.now))
    delay = 0.0 if isinstance(recovery.action, GiveUp) else recovery.action.after_seconds
    return time_after(s.now, delay)


def _recovery_reason(recovery: Recovery, failed_pods: tuple[FailedPod, ...]) -> str:
    if not recovery.is_continuation:
        return recovery.action.reason
    return f"{', '.join(failed_pod.name for failed_pod in failed_pods)} failed with the pod being replaced"


def last_restarts(s: ObservedState) -> tuple[Restarts, LastFailure | None]:
    """Return all restarts, including those in termination messages only: the gang ended before the next poll."""
    if s.ladder.rank_restarts is None:
        # No pod was polled since one was replaced, and that replacement restarted the ranks of the others.
        return s.restarts, None
    terminations = {
        index: pod.ended.termination for index, pod in s.trainers.items() if pod.ended and pod.ended.termination
    }
    more = sum(termination.restarts for termination in terminations.values()) - s.ladder.rank_restarts
    if more <= 0:
        return s.restarts, None
    index = max(terminations, key=lambda index: terminations[index].restarts)
    failed_pod = pod_of_restarted_ranks(index, s.trainers[index], terminations[index].fault)
    ladder = s.ladder.model_copy(update={"rank_restarts": s.ladder.rank_restarts + more})
    return s.restarts.model_copy(update={"ranks": s.restarts.ranks + more, "ladder": ladder}), _last_failure(
        s, (failed_pod,)
    )


def _final_reason(failed_pods: tuple[FailedPod, ...]) -> Reason:
    is_permanent = any(failed_pod.failure.cause is FailureCause.BAD_CONFIGURATION for failed_pod in failed_pods)
    return Reason.BAD_CONFIGURATION if is_permanent else Reason.BACKOFF_LIMIT_EXCEEDED


def _last_failure(s: ObservedState, failed_pods: tuple[FailedPod, ...]) -> LastFailure:
    blamed = find_culprit(tuple(failed_pod.failure for failed_pod in failed_pods))
    blamed_pod = next(failed_pod for failed_pod in failed_pods if failed_pod.failure is blamed)
    return LastFailure(
        time=format_time(s.now),
        pod=blamed_pod.name,
        node=None if blamed_pod.pod is None else blamed_pod.pod.node,
        rank=blamed_pod.rank,
        exit_code=blamed_pod.exit_code,
        reason=blamed.cause.value,
        message=blamed.message[:4096],
    )
