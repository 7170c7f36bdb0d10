"""From failures to the next state of the ladder: what is charged, what is replaced, when it may start.

Which rung is for moejob_api.restarts to say; here its answer is written down so that nothing is charged twice.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import assert_never

from moejob_api.job.lifecycle import Gang
from moejob_api.job.status import MAX_REPLACED, Ladder, LastFailure, Phase, Replaced, Restarts
from moejob_api.restarts import (
    Budget,
    Cause,
    GiveUp,
    ReplaceGang,
    ReplacePods,
    RestartRanks,
    culprit,
    decide,
)
from moejob_operator.observed import PodPhase
from moejob_operator.planning.failures import Loss, loss_of_ranks, rank_restarts
from moejob_operator.planning.situation import Situation, gang_of, restarting_or_pending, spec_and_layout
from moejob_operator.planning.step import Reason, Step
from moejob_operator.planning.times import later, seconds_until, written


def recovery(s: Situation, lost: tuple[Loss, ...]) -> Step:
    """What to do about everything that failed since the last decision. Only remembered here, acted upon later."""
    budget = budget_of(s)
    decision = decide(tuple(loss.failure for loss in lost), budget)
    failure = _last_failure(s, lost)
    if _belongs_to_last_event(s, lost) and not isinstance(decision, GiveUp):
        return _absorbed(s, lost, budget)
    match decision:
        case GiveUp(reason=reason):
            return Step(Phase.FAILED, _final_reason(lost), reason, failure=failure, needs_live=True)
        case RestartRanks(budget=charged, reason=reason):
            return _noted(s, charged, reason, failure)
        case ReplacePods(pods=pods, after_seconds=delay, budget=charged, reason=reason):
            if _can_be_mended(s, pods):
                return _pods_replaced(s, (lost, charged), delay, reason, failure)
            return _gang_replaced(s, charged, delay, reason, failure)
        case ReplaceGang(after_seconds=delay, budget=charged, reason=reason):
            return _gang_replaced(s, charged, delay, reason, failure)
        case None:
            raise AssertionError("recovery was asked for without a failure")
        case _:
            assert_never(decision)


def budget_of(s: Situation) -> Budget:
    """What has been spent, as the status remembers it."""
    spec, _ = spec_and_layout(s)
    return Budget(
        limit=spec.lifecycle.backoff_limit,
        spent=s.restarts.since_checkpoint,
        in_place=s.ladder.in_place,
        pods=s.ladder.pods,
        uncounted=s.ladder.uncounted,
    )


def fresh_gang(restarts: Restarts) -> Restarts:
    """The same budget with no memory of pods: the next gang has none of them."""
    forgotten = {"in_place": 0, "rank_restarts": None, "gang_was_whole": False, "replacing": (), "start_after": None}
    ladder = restarts.ladder.model_copy(update=forgotten)
    return restarts.model_copy(update={"ladder": ladder})


# --- failures that belong together -----------------------------------------------------------------------------------


def _belongs_to_last_event(s: Situation, lost: Iterable[Loss]) -> bool:
    """Whether only pods failed that stood beside one being replaced: its peers do not always survive it.

    A pod that has been replaced and fails again is a new failure, and so is any failure once the gang was whole again.
    """
    replaced = {entry.index for entry in s.ladder.replacing}
    return bool(replaced) and all(not loss.failure.pod_alive and loss.failure.pod not in replaced for loss in lost)


def _absorbed(s: Situation, lost: tuple[Loss, ...], budget: Budget) -> Step:
    pods = tuple(loss.failure.pod for loss in lost)
    if 0 in pods or not _can_be_mended(s, pods):
        waited = seconds_until(s.ladder.start_after, s.now)
        return _gang_replaced(s, budget, waited, f"{lost[0].name} failed with the pod being replaced", None)
    ladder = s.ladder.model_copy(update={"replacing": _replacing(s.ladder, lost)})
    restarts = s.restarts.model_copy(update={"pods": s.restarts.pods + len(lost), "ladder": ladder})
    names = ", ".join(loss.name for loss in lost)
    return Step(
        restarting_or_pending(s),
        Reason.PODS_REPLACED,
        f"{names} failed with the pod being replaced",
        restarts=restarts,
        needs_live=True,
        look_again_after_seconds=0.0,
    )


def _can_be_mended(s: Situation, lost: tuple[int, ...]) -> bool:
    """Whether the others can go on: one that has ended well cannot meet a new pod any more."""
    # Kueue keeps a pod of a group, and so its name, until the whole group has ended.
    if gang_of(s) is Gang.KUEUE:
        return False
    others_run = all(pod.phase is not PodPhase.SUCCEEDED for index, pod in s.trainers.items() if index not in lost)
    return others_run and len({*lost, *(entry.index for entry in s.ladder.replacing)}) <= MAX_REPLACED


def _replacing(ladder: Ladder, lost: tuple[Loss, ...]) -> tuple[Replaced, ...]:
    entries = {entry.index: entry for entry in ladder.replacing}
    for loss in lost:
        index = loss.failure.pod
        entries[index] = Replaced(index=index, uid="" if loss.pod is None else loss.pod.uid)
    return tuple(entries[index] for index in sorted(entries))


# --- rungs ------------------------------------------------------------------------------------------------------------


def _noted(s: Situation, charged: Budget, reason: str, failure: LastFailure | None) -> Step:
    """The launcher has restarted ranks already: only the charge is left to be written."""
    reported = rank_restarts(s)
    known = s.ladder.rank_restarts or 0
    restarts = _charged(s, charged).model_copy(update={"ranks": s.restarts.ranks + max(1, (reported or 0) - known)})
    ladder = restarts.ladder.model_copy(update={"rank_restarts": reported})
    return Step(
        Phase.RUNNING,
        Reason.ALL_PODS_RUN,
        reason,
        restarts=restarts.model_copy(update={"ladder": ladder}),
        failure=failure,
        pods_created=True,
        look_again_after_seconds=0.0,
    )


def _pods_replaced(
    s: Situation, charge: tuple[tuple[Loss, ...], Budget], delay: float, reason: str, failure: LastFailure | None
) -> Step:
    lost, budget = charge
    restarts = _charged(s, budget)
    ladder = restarts.ladder.model_copy(
        update={
            "rank_restarts": None,
            "replacing": _replacing(s.ladder, lost),
            "start_after": later(s.now, delay),
        }
    )
    return Step(
        Phase.RESTARTING,
        Reason.PODS_REPLACED,
        reason,
        restarts=restarts.model_copy(update={"pods": s.restarts.pods + len(lost), "ladder": ladder}),
        failure=failure,
        needs_live=True,
        look_again_after_seconds=0.0,
    )


def _gang_replaced(s: Situation, charged: Budget, delay: float, reason: str, failure: LastFailure | None) -> Step:
    """The next attempt. Written before anything is deleted: a crash in between must not refund the restart."""
    restarts = fresh_gang(_charged(s, charged))
    ladder = restarts.ladder.model_copy(update={"start_after": later(s.now, delay)})
    return Step(
        Phase.RESTARTING,
        Reason.GANG_RESTARTED,
        reason,
        attempt=s.attempt + 1,
        restarts=restarts.model_copy(update={"total": s.restarts.total + 1, "ladder": ladder}),
        failure=failure,
        needs_live=True,
        look_again_after_seconds=0.0,
    )


def last_restarts(s: Situation) -> tuple[Restarts, LastFailure | None]:
    """Restarts in place that only the last words of a gang tell of, which has ended well before it was asked again."""
    if s.ladder.rank_restarts is None and s.restarts.pods:
        # Nobody asked since a pod was replaced: for that the ranks of the others were restarted.
        return s.restarts, None
    words = {index: pod.ended.word for index, pod in s.trainers.items() if pod.ended and pod.ended.word}
    more = sum(word.restarts for word in words.values()) - (s.ladder.rank_restarts or 0)
    if more <= 0:
        return s.restarts, None
    index = max(words, key=lambda index: words[index].restarts)
    loss = loss_of_ranks(index, s.trainers[index], words[index].fault)
    ladder = s.ladder.model_copy(update={"rank_restarts": (s.ladder.rank_restarts or 0) + more})
    return s.restarts.model_copy(update={"ranks": s.restarts.ranks + more, "ladder": ladder}), _last_failure(s, (loss,))


def _charged(s: Situation, budget: Budget) -> Restarts:
    ladder = s.ladder.model_copy(
        update={"in_place": budget.in_place, "pods": budget.pods, "uncounted": budget.uncounted}
    )
    return s.restarts.model_copy(
        update={
            "since_checkpoint": budget.spent,
            "preemptions": s.restarts.preemptions + max(0, budget.uncounted - s.ladder.uncounted),
            "ladder": ladder,
        }
    )


def _final_reason(lost: tuple[Loss, ...]) -> Reason:
    is_permanent = any(loss.failure.cause is Cause.BAD_CONFIGURATION for loss in lost)
    return Reason.BAD_CONFIGURATION if is_permanent else Reason.BACKOFF_LIMIT_EXCEEDED


def _last_failure(s: Situation, lost: tuple[Loss, ...]) -> LastFailure:
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
