"""The decision about a job: guards in the order in which they are asked, the first that has something to say decides.

Each is handed what was observed and the time, and returns a step or None. What comes later may rely on what came
before: behind `invalid` there is a spec and a layout, behind `old_gang` no pod of another attempt.
"""

from __future__ import annotations

from collections.abc import Callable

from moejob_api.contract import Role
from moejob_api.job.status import ConditionStatus, ConditionType, Phase, Restarts
from moejob_operator.actions import Action, Delete, Kind, Notice, Ref, Severity
from moejob_operator.observed import Pod, PodPhase
from moejob_operator.planning import objects
from moejob_operator.planning.failures import KUBELET_SECONDS, losses, rank_restarts
from moejob_operator.planning.recovery import fresh_gang, last_restarts, recovery
from moejob_operator.planning.situation import Situation, restarting_or_pending, spec_and_layout, started_at
from moejob_operator.planning.step import Reason, Step
from moejob_operator.planning.times import read, seconds_since, seconds_until, soonest, written
from moejob_operator.planning.waiting import Hold, hold, rollout_hold

Guard = Callable[[Situation], Step | None]

# How often running pods are asked how they are, and when for the first time.
POLL_SECONDS = 30.0
FIRST_POLL_SECONDS = 5.0
# What the API server refused may be allowed later without any event telling so.
REFUSED_SECONDS = 30.0
# Whether a kubelet is gone shows in nothing that is watched.
ENDING_SECONDS = 10.0


def being_deleted(s: Situation) -> Step | None:
    """The garbage collector deletes what the job owns; creating anything now would only race it."""
    return Step(None) if s.seen.job.is_being_deleted else None


def finished(s: Situation) -> Step | None:
    """Nothing brings a finished job back: pods that still hold GPUs go, the others stay for their logs."""
    phase = s.status.phase
    if phase is None or not phase.is_finished:
        return None
    holding = (pod for pod in s.seen.pods if not pod.phase.has_ended)
    actions: tuple[Action, ...] = objects.deletions(holding, s)
    left = _seconds_to_live(s)
    if left is not None and left <= 0:
        job = s.seen.job
        actions = (Delete(Ref(Kind.JOB, job.namespace, job.name, job.uid)),)
    ending = any(pod.is_terminating for pod in s.seen.pods)
    return Step(
        phase,
        actions=actions,
        needs_live=bool(actions),
        look_again_after_seconds=soonest(left or None, ENDING_SECONDS if ending else None),
    )


def suspended(s: Situation) -> Step | None:
    """Pods go, after saving; claim and Service stay. The attempt ends too, so that what comes later is fenced off."""
    spec = s.seen.job.spec
    if spec is None or not spec.lifecycle.suspend or s.gang_succeeded:
        return None
    message = "lifecycle.suspend is true; the volume and its checkpoints are kept"
    forgotten = fresh_gang(s.restarts)
    if s.trainers:
        return Step(
            Phase.SUSPENDED,
            Reason.SUSPENDED,
            message,
            attempt=s.attempt + 1,
            restarts=forgotten,
            needs_live=True,
            look_again_after_seconds=0.0,
        )
    actions = objects.deletions(s.seen.pods, s)
    return Step(
        Phase.SUSPENDED,
        Reason.SUSPENDED,
        message,
        actions=actions,
        restarts=forgotten,
        needs_live=bool(actions),
        look_again_after_seconds=ENDING_SECONDS if s.seen.pods else None,
    )


def invalid(s: Situation) -> Step | None:
    """A job that cannot work creates nothing. One that was accepted before is not stopped by newer rules."""
    if s.judged.is_accepted:
        return None
    was_accepted = any(
        found.type is ConditionType.ACCEPTED and found.status is ConditionStatus.TRUE for found in s.status.conditions
    )
    if was_accepted and s.seen.job.spec is not None and s.judged.layout is not None:
        return None
    phase = s.status.phase if was_accepted and s.status.phase is not None else Phase.PENDING
    return Step(phase, Reason.INVALID, "the job was not accepted")


def deadline_passed(s: Situation) -> Step | None:
    """The job has been active for longer than it may."""
    left = seconds_to_deadline(s)
    if left is None or left > 0 or s.gang_succeeded:
        return None
    spec, _ = spec_and_layout(s)
    limit = spec.lifecycle.active_deadline_seconds
    return Step(
        Phase.FAILED,
        Reason.DEADLINE_EXCEEDED,
        f"the job was active for longer than lifecycle.activeDeadlineSeconds {limit}",
        needs_live=True,
        look_again_after_seconds=0.0,
    )


def failed(s: Situation) -> Step | None:
    """Something broke: the recovery ladder says what is replaced and what it costs."""
    lost = losses(s)
    return recovery(s, lost) if lost else None


def succeeded(s: Situation) -> Step | None:
    """Every rank of every trainer pod has ended well. Engines never do, and are not waited for."""
    if not s.gang_succeeded:
        return None
    restarts, failure = last_restarts(s)
    return Step(
        Phase.SUCCEEDED,
        Reason.COMPLETED,
        "every rank has finished",
        restarts=restarts,
        failure=failure,
        needs_live=True,
        pods_created=True,
    )


def old_gang(s: Situation) -> Step | None:
    """Pods of another attempt are deleted and waited for: two gangs would write to one volume."""
    if not s.old:
        return None
    actions = objects.deletions(s.old, s, objects.BROKEN_GANG_SECONDS)
    return Step(
        restarting_or_pending(s),
        Reason.OLD_PODS_LEFT if s.refusal is None else Reason.DELETION_REFUSED,
        s.refusal or _ending(s),
        actions=actions,
        needs_live=bool(actions),
        look_again_after_seconds=ENDING_SECONDS,
        notices=_told(actions, s),
    )


def held_back(s: Situation) -> Step | None:
    """Nothing may be created yet: pods of an earlier job of this name are there, or the gang scheduler is missing."""
    waiting = hold(s)
    if waiting.reason not in (Reason.NAME_TAKEN, Reason.GANG_API_MISSING) or s.gang_runs:
        return None
    return Step(restarting_or_pending(s), waiting.reason, waiting.message, look_again_after_seconds=REFUSED_SECONDS)


def present(s: Situation) -> Step | None:
    """The job as it should be: what is missing is created, what was answered for is cleared away."""
    _, layout = spec_and_layout(s)
    spent = objects.deletions((*objects.answered_pods(s), *objects.spent_engines(s)), s)
    created = objects.missing(s)
    is_more = len(created) == objects.CREATED_AT_ONCE and s.refusal is None
    is_restart = s.attempt > 0 or bool(s.ladder.replacing)
    is_running = s.gang_runs and not objects.answered_pods(s)
    started = objects.pods_among(created, Role.TRAINER)
    is_whole = len(s.trainers) + (started if s.refusal is None else 0) == layout.nodes
    waiting = _running(s) if is_running else hold(s)
    return Step(
        Phase.RUNNING if is_running else restarting_or_pending(s),
        waiting.reason,
        waiting.message,
        actions=(*spent, *created),
        restarts=_settled(s, is_whole=is_whole),
        pods_created=is_whole,
        # The first gang of all can have no other beside it.
        needs_live=bool(spent) or (is_restart and started > 0),
        look_again_after_seconds=0.0 if is_more else _next_look(s, is_running=is_running),
        notices=_told(spent, s),
    )


GUARDS: tuple[Guard, ...] = (
    being_deleted,
    finished,
    suspended,
    invalid,
    deadline_passed,
    failed,
    succeeded,
    old_gang,
    held_back,
    present,
)


# --- the end ----------------------------------------------------------------------------------------------------------


def _seconds_to_live(s: Situation) -> float | None:
    spec = s.seen.job.spec
    ttl = None if spec is None else spec.lifecycle.ttl_seconds_after_finished
    if ttl is None:
        return None
    return max(0.0, ttl - seconds_since(read(s.status.completion_time), s.now))


def seconds_to_deadline(s: Situation) -> float | None:
    """Seconds of activity that are left; None without a deadline."""
    spec, _ = spec_and_layout(s)
    limit = spec.lifecycle.active_deadline_seconds
    if limit is None:
        return None
    suspended_seconds = 0.0 if s.status.goodput is None else s.status.goodput.suspended_seconds
    return limit - (seconds_since(started_at(s), s.now) - suspended_seconds - _still_suspended_seconds(s))


def _still_suspended_seconds(s: Situation) -> float:
    """Of a pause that ends with this look."""
    pause = next((found for found in s.status.conditions if found.type is ConditionType.SUSPENDED), None)
    if pause is None or pause.status is not ConditionStatus.TRUE:
        return 0.0
    return seconds_since(read(pause.last_transition_time), s.now)


# --- the gang as it is ------------------------------------------------------------------------------------------------


def _settled(s: Situation, *, is_whole: bool) -> Restarts:
    """What is remembered of the gang: that it was whole, and when it came together that its restart is over."""
    changes: dict[str, object] = {"gang_was_whole": s.ladder.gang_was_whole or is_whole}
    if s.gang_runs and not objects.answered_pods(s) and all(_is_ready(pod) for pod in s.trainers.values()):
        changes |= {"replacing": (), "start_after": None}
    reported, known = rank_restarts(s), s.ladder.rank_restarts
    if reported is not None and (known is None or reported < known):
        changes["rank_restarts"] = reported
    return s.restarts.model_copy(update={"ladder": s.ladder.model_copy(update=changes)})


def _is_ready(pod: Pod) -> bool:
    return pod.is_ready or pod.phase is PodPhase.SUCCEEDED


def _running(s: Situation) -> Hold:
    ending = next((pod for _, pod in sorted(s.trainers.items()) if pod.is_terminating), None)
    if ending is not None:
        return Hold(Reason.POD_ENDING, f"{ending.name} has been asked to end")
    engines = rollout_hold(s)
    return engines or Hold(Reason.ALL_PODS_RUN, "every trainer pod runs")


def _ending(s: Situation) -> str:
    stuck = next((pod for pod in s.old if _is_stuck(pod, s)), None)
    if stuck is None:
        return "waiting for the pods of the last attempt to end"
    return (
        f"{stuck.name} should have ended by {written(stuck.ends_by or s.now)}, and node {stuck.node} does not say that "
        "it has; the next gang starts when it has, or when the node is known to be lost"
    )


def _is_stuck(pod: Pod, s: Situation) -> bool:
    return pod.is_terminating and seconds_since(pod.ends_by, s.now) >= KUBELET_SECONDS


def _told(deletes: tuple[Delete, ...], s: Situation) -> tuple[Notice, ...]:
    """Deletions that nothing else in the status tells of."""
    engines = {pod.uid for pod in s.rollouts}
    forced = [
        Notice(Severity.WARNING, "PodForceDeleted", f"{found.ref.name} was deleted without its node, which is lost")
        for found in deletes
        if found.is_forced
    ]
    replaced = [
        Notice(Severity.WARNING, "RolloutReplaced", f"engine {found.ref.name} has lost its place and is replaced")
        for found in deletes
        if found.ref.uid in engines
    ]
    return (*forced, *replaced)


def _poll_seconds(s: Situation) -> float:
    youngest = min(seconds_since(pod.started_at, s.now) for pod in s.trainers.values())
    return POLL_SECONDS if youngest >= FIRST_POLL_SECONDS else FIRST_POLL_SECONDS - youngest


def _next_look(s: Situation, *, is_running: bool) -> float | None:
    engines = [objects.engine_wait_seconds(pod, s) for pod in s.rollouts if objects.is_lost_engine(pod, s)]
    is_ending = any(pod.is_terminating for pod in (*s.trainers.values(), *s.rollouts))
    return soonest(
        seconds_until(s.ladder.start_after, s.now) or None,
        _poll_seconds(s) if is_running else None,
        REFUSED_SECONDS if s.refusal is not None else None,
        ENDING_SECONDS if is_ending else None,
        *engines,
    )
