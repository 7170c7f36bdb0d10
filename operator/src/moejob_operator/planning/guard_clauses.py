"""The decision about a job: guards in order, of which the first that returns a decision wins.

Each guard gets the observed state and the time, and returns a decision or None. A guard may rely on those before it:
after the guard against invalid jobs there is a spec and a layout, after that of the old gang no pod of another attempt.
"""

from __future__ import annotations

from collections.abc import Callable

from moejob_api.contract.pods import Role, StatusMeasure
from moejob_api.job.status import ConditionStatus, ConditionType, Phase, Restarts
from moejob_api.recovery.state import settled
from moejob_operator.actions import Action, Delete, Event, EventReason, Kind, Ref, Severity
from moejob_operator.observed import Pod
from moejob_operator.planning import objects
from moejob_operator.planning.decision import Decision, Reason
from moejob_operator.planning.failures import KUBELET_SECONDS, Verdict, losses, pending_verdict
from moejob_operator.planning.observed_state import ObservedState, restarting_or_pending, spec_and_layout, started_at
from moejob_operator.planning.recovery import gang_report, last_restarts, recovery
from moejob_operator.planning.recovery_state import fresh_gang, recovery_state, with_state
from moejob_operator.planning.timestamps import read, seconds_since, seconds_until, soonest, written
from moejob_operator.planning.waiting import Hold, hold, hold_beside_gang

Guard = Callable[[ObservedState], Decision | None]

# Seconds between polls of running pods, and the ages of the first polls: young pods have more news.
POLL_SECONDS = 30.0
POLL_AGES = (5.0, 10.0, 20.0, 40.0)
# The API server may later accept a refused object, without any event.
REFUSED_SECONDS = 30.0
# No watch shows that a kubelet is gone.
ENDING_SECONDS = 10.0


def being_deleted(s: ObservedState) -> Decision | None:
    """The garbage collector deletes what the job owns; creating anything now would only race it."""
    return Decision(None) if s.seen.job.is_being_deleted else None


def finished(s: ObservedState) -> Decision | None:
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
    return Decision(
        phase,
        actions=actions,
        needs_live=bool(actions),
        requeue_after_seconds=soonest(left or None, ENDING_SECONDS if ending else None),
    )


def suspended(s: ObservedState) -> Decision | None:
    """Pods save and go; claim and Service stay. The attempt ends too, so that late writes are fenced off."""
    spec = s.seen.job.spec
    if spec is None or not spec.lifecycle.suspend or s.gang_succeeded:
        return None
    message = "lifecycle.suspend is true; the volume and its checkpoints are kept"
    forgotten = fresh_gang(s.restarts)
    if s.trainers:
        return Decision(
            Phase.SUSPENDED,
            Reason.SUSPENDED,
            message,
            attempt=s.attempt + 1,
            restarts=forgotten,
            needs_live=True,
            requeue_after_seconds=0.0,
        )
    actions = objects.deletions(s.seen.pods, s)
    return Decision(
        Phase.SUSPENDED,
        Reason.SUSPENDED,
        message,
        actions=actions,
        restarts=forgotten,
        needs_live=bool(actions),
        requeue_after_seconds=ENDING_SECONDS if s.seen.pods else None,
    )


def invalid(s: ObservedState) -> Decision | None:
    """A job that cannot work creates nothing. One that was accepted before is not stopped by newer rules."""
    if s.validation.is_accepted:
        return None
    was_accepted = any(
        found.type is ConditionType.ACCEPTED and found.status is ConditionStatus.TRUE for found in s.status.conditions
    )
    if was_accepted and s.seen.job.spec is not None and s.validation.layout is not None:
        return None
    phase = s.status.phase if was_accepted and s.status.phase is not None else Phase.PENDING
    return Decision(phase, Reason.INVALID, "the job was not accepted")


def deadline_passed(s: ObservedState) -> Decision | None:
    """The job has been active for longer than it may."""
    left = seconds_to_deadline(s)
    if left is None or left > 0 or s.gang_succeeded:
        return None
    spec, _ = spec_and_layout(s)
    limit = spec.lifecycle.active_deadline_seconds
    return Decision(
        Phase.FAILED,
        Reason.DEADLINE_EXCEEDED,
        f"the job was active for longer than lifecycle.activeDeadlineSeconds {limit}",
        needs_live=True,
        requeue_after_seconds=0.0,
    )


def secret_lost(s: ObservedState) -> Decision | None:
    """Engines with a deleted Secret's value end before a new Secret is made: later they look like others."""
    actions = objects.deletions(objects.outdated_engines(s), s)
    if not actions:
        return None
    return Decision(
        s.status.phase or restarting_or_pending(s),
        Reason.SECRET_LOST,
        "the job's Secret is gone: engines that know its value are replaced before it is made again",
        actions=actions,
        pods_created=s.ladder.gang_was_whole,
        needs_live=True,
        requeue_after_seconds=0.0,
        events=_events(actions, s),
    )


def failed(s: ObservedState) -> Decision | None:
    """Something broke: the recovery ladder says what is replaced and what it costs."""
    lost = losses(s)
    if not lost:
        return None
    verdict = pending_verdict(s, lost)
    return recovery(s, lost) if verdict is None else _undecided(s, verdict)


def succeeded(s: ObservedState) -> Decision | None:
    """Every rank of every trainer pod has ended well. Engines never end, and are not awaited."""
    if not s.gang_succeeded:
        return None
    restarts, failure = last_restarts(s)
    reason, message = _success(s)
    return Decision(
        Phase.SUCCEEDED,
        reason,
        message,
        restarts=restarts,
        failure=failure,
        needs_live=True,
        pods_created=True,
    )


def _success(s: ObservedState) -> tuple[Reason, str]:
    if s.run is None or StatusMeasure.STOPPED_EARLY not in s.run.measures:
        return Reason.COMPLETED, "every rank has finished"
    return Reason.STOPPED_EARLY, (
        f"stopped early at step {s.run.step}, where evaluations had not improved for as long as training.earlyStop says"
    )


def old_gang(s: ObservedState) -> Decision | None:
    """Pods of another attempt are deleted and waited for: two gangs would write to one volume."""
    if not s.old:
        return None
    actions = objects.deletions(s.old, s, objects.BROKEN_GANG_SECONDS)
    return Decision(
        restarting_or_pending(s),
        Reason.OLD_PODS_LEFT if s.refusal is None else Reason.DELETION_REFUSED,
        s.refusal or _ending(s),
        actions=actions,
        needs_live=bool(actions),
        requeue_after_seconds=ENDING_SECONDS,
        events=_events(actions, s),
    )


def held_back(s: ObservedState) -> Decision | None:
    """Nothing may be created yet: pods of an earlier job of this name are there, or the gang scheduler is missing."""
    waiting = hold(s)
    if waiting.reason not in (Reason.NAME_TAKEN, Reason.GANG_API_MISSING) or s.gang_runs:
        return None
    return Decision(restarting_or_pending(s), waiting.reason, waiting.message, requeue_after_seconds=REFUSED_SECONDS)


def present(s: ObservedState) -> Decision | None:
    """Create missing objects, and delete pods whose failure has been charged."""
    _, layout = spec_and_layout(s)
    spent = objects.deletions((*objects.answered_pods(s), *objects.spent_engines(s), *s.unplanned), s)
    created = objects.missing(s)
    is_more = len(created) == objects.CREATED_AT_ONCE and s.refusal is None
    is_restart = s.attempt > 0 or bool(s.ladder.replacing)
    is_running = s.gang_runs and not objects.answered_pods(s)
    started = objects.pods_among(created, Role.TRAINER)
    is_whole = len(s.trainers) + (started if s.refusal is None else 0) == layout.nodes
    waiting = _running(s) if is_running else hold(s)
    return Decision(
        Phase.RUNNING if is_running else restarting_or_pending(s),
        waiting.reason,
        waiting.message,
        actions=(*spent, *created),
        restarts=_settled(s, is_whole=is_whole),
        pods_created=is_whole,
        # The first gang of all can have no other beside it. Where pods hold the value of the Secret, the live decision
        # also checks that the Secret exists.
        needs_live=bool(spent)
        or (is_restart and started > 0)
        or (s.seen.holds_secret and objects.makes_secret(created)),
        requeue_after_seconds=0.0 if is_more else _requeue_seconds(s, is_running=is_running),
        events=_events(spent, s),
    )


GUARDS: tuple[Guard, ...] = (
    being_deleted,
    finished,
    suspended,
    invalid,
    deadline_passed,
    secret_lost,
    failed,
    succeeded,
    old_gang,
    held_back,
    present,
)


def _undecided(s: ObservedState, verdict: Verdict) -> Decision:
    """Leave everything as it is, the phase too: goodput accounts for this time with the failure."""
    return Decision(
        s.status.phase or restarting_or_pending(s),
        Reason.LOST_PEERS,
        verdict.message,
        pods_created=s.ladder.gang_was_whole,
        # The pod may reply again, which no watch shows.
        requeue_after_seconds=min(verdict.seconds, ENDING_SECONDS),
    )


# --- the end ----------------------------------------------------------------------------------------------------------


def _seconds_to_live(s: ObservedState) -> float | None:
    spec = s.seen.job.spec
    ttl = None if spec is None else spec.lifecycle.ttl_seconds_after_finished
    if ttl is None:
        return None
    return max(0.0, ttl - seconds_since(read(s.status.completion_time), s.now))


def seconds_to_deadline(s: ObservedState) -> float | None:
    """Seconds of activity that are left; None without a deadline."""
    spec, _ = spec_and_layout(s)
    limit = spec.lifecycle.active_deadline_seconds
    if limit is None:
        return None
    suspended_seconds = 0.0 if s.status.goodput is None else s.status.goodput.suspended_seconds
    return limit - (seconds_since(started_at(s), s.now) - suspended_seconds - _still_suspended_seconds(s))


def _still_suspended_seconds(s: ObservedState) -> float:
    """Seconds of a suspension that ends with this reconcile."""
    pause = next((found for found in s.status.conditions if found.type is ConditionType.SUSPENDED), None)
    if pause is None or pause.status is not ConditionStatus.TRUE:
        return 0.0
    return seconds_since(read(pause.last_transition_time), s.now)


# --- the gang as it is ------------------------------------------------------------------------------------------------


def _settled(s: ObservedState, *, is_whole: bool) -> Restarts:
    """Mark the gang as whole in the restarts, and its restart as over once all of its pods are ready."""
    spec, _ = spec_and_layout(s)
    gang = gang_report(s)
    restarts = with_state(s.restarts, settled(gang, recovery_state(s.restarts, spec.lifecycle.backoff_limit)))
    changes: dict[str, object] = {"gang_was_whole": s.ladder.gang_was_whole or is_whole}
    if gang.is_ready:
        changes["start_after"] = None
    return restarts.model_copy(update={"ladder": restarts.ladder.model_copy(update=changes)})


def _running(s: ObservedState) -> Hold:
    ending = next((pod for _, pod in sorted(s.trainers.items()) if pod.is_terminating), None)
    if ending is not None:
        return Hold(Reason.POD_ENDING, f"{ending.name} has been asked to end")
    return hold_beside_gang(s) or Hold(Reason.ALL_PODS_RUN, "every trainer pod runs")


def _ending(s: ObservedState) -> str:
    stuck = next((pod for pod in s.old if _is_stuck(pod, s)), None)
    if stuck is None:
        return "waiting for the pods of the last attempt to end"
    return (
        f"{stuck.name} should have ended by {written(stuck.ends_by or s.now)}, and node {stuck.node} does not say that "
        "it has; the next gang starts when it has, or when the node is known to be lost"
    )


def _is_stuck(pod: Pod, s: ObservedState) -> bool:
    return pod.is_terminating and seconds_since(pod.ends_by, s.now) >= KUBELET_SECONDS


def _events(deletes: tuple[Delete, ...], s: ObservedState) -> tuple[Event, ...]:
    """Return the events of deletions that nothing else in the status shows."""
    engines, unplanned = {pod.uid for pod in s.rollouts}, {pod.uid for pod in s.unplanned}
    forced = [
        Event(
            Severity.WARNING,
            EventReason.POD_FORCE_DELETED,
            f"{found.ref.name} was deleted without its node, which is lost",
        )
        for found in deletes
        if found.is_forced
    ]
    replaced = [
        Event(
            Severity.WARNING,
            EventReason.ROLLOUT_REPLACED,
            f"engine {found.ref.name} has lost its place and is replaced",
        )
        for found in deletes
        if found.ref.uid in engines
    ]
    unknown = [
        Event(
            Severity.WARNING,
            EventReason.UNKNOWN_POD_DELETED,
            f"{found.ref.name} has the marks of this job, which did not create it, and was deleted",
        )
        for found in deletes
        if found.ref.uid in unplanned
    ]
    return (*forced, *replaced, *unknown)


def _poll_seconds(s: ObservedState) -> float:
    youngest = min(seconds_since(pod.started_at, s.now) for pod in s.trainers.values())
    return min([POLL_SECONDS, *(age - youngest for age in POLL_AGES if age > youngest)])


def _requeue_seconds(s: ObservedState, *, is_running: bool) -> float | None:
    engines = [objects.engine_wait_seconds(pod, s) for pod in s.rollouts if objects.is_lost_engine(pod, s)]
    is_ending = any(pod.is_terminating for pod in (*s.trainers.values(), *s.rollouts))
    return soonest(
        seconds_until(s.ladder.start_after, s.now) or None,
        _poll_seconds(s) if is_running else None,
        REFUSED_SECONDS if s.refusal is not None else None,
        ENDING_SECONDS if is_ending else None,
        *engines,
    )
