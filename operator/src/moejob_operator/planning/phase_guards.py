"""The phase of a job and the actions that go with it: guards in order. The first guard that returns a decision wins.

Each guard gets the observed state with its time, and returns a decision or None. A guard may rely on earlier guards:
behind the guard against invalid jobs there is a spec and a layout, behind the guard of the old gang no older pod.
"""

from __future__ import annotations

from collections.abc import Callable

from moejob_api.contract.pods import PodRole, StatusMeasure
from moejob_api.job.status import ConditionStatus, ConditionType, Phase, Restarts
from moejob_api.job.storage import Reclaim
from moejob_api.recovery.state import state_after_report
from moejob_operator.actions import Action, Delete, Event, EventReason, Kind, ObjectReference, Severity
from moejob_operator.observed import PodPhase
from moejob_operator.planning import objects
from moejob_operator.planning.decision import Decision, Reason
from moejob_operator.planning.failures import KUBELET_SECONDS, Verdict, find_failed_pods, pending_verdict
from moejob_operator.planning.observed_state import (
    ObservedState,
    job_start_time,
    restarting_or_pending,
    spec_and_layout,
)
from moejob_operator.planning.recovery import gang_report, last_restarts, plan_recovery
from moejob_operator.planning.recovery_state import forget_gang, recovery_state, restarts_with_state
from moejob_operator.planning.timestamps import format_time, parse_time, seconds_since, seconds_until, shortest_wait
from moejob_operator.planning.waiting import WaitReason, find_engine_wait_reason, find_wait_reason

Guard = Callable[[ObservedState], Decision | None]

# Seconds between polls of running pods, and the ages of the first polls: young pods have more news.
POLL_SECONDS = 30.0
POLL_AGES = (5.0, 10.0, 20.0, 40.0)
# The API server may later accept a refused object, without any event.
REFUSED_SECONDS = 30.0
# No watch shows that a kubelet is gone.
ENDING_SECONDS = 10.0


def leave_deleted_job(s: ObservedState) -> Decision | None:
    """The garbage collector deletes what the job owns; creating anything now would only race it."""
    return Decision(None) if s.observation.job.is_being_deleted else None


def clean_up_finished_job(s: ObservedState) -> Decision | None:
    """Nothing brings a finished job back: pods that still hold GPUs go, the others stay for their logs."""
    phase = s.status.phase
    if phase is None or not phase.is_finished:
        return None
    holding = (pod for pod in s.observation.pods if not pod.phase.has_ended)
    actions: tuple[Action, ...] = objects.pod_deletions(holding, s)
    seconds_left = _seconds_to_live(s)
    if seconds_left is not None and seconds_left <= 0:
        job = s.observation.job
        # The garbage collector would take the job's own claim with it, and on that claim are the weights.
        actions = (
            objects.pod_deletions(s.observation.pods, s)
            if _keeps_claim(s)
            else (Delete(ObjectReference(Kind.JOB, job.namespace, job.name, job.uid)),)
        )
    has_ending_pods = any(pod.is_terminating for pod in s.observation.pods)
    return Decision(
        phase,
        actions=actions,
        needs_live=bool(actions),
        requeue_after_seconds=shortest_wait(seconds_left or None, ENDING_SECONDS if has_ending_pods else None),
    )


def suspend_job(s: ObservedState) -> Decision | None:
    """Pods save and go; claim and Service stay. The attempt ends too, so that late writes are fenced off."""
    spec = s.observation.job.spec
    if spec is None or not spec.lifecycle.suspend or s.has_gang_succeeded:
        return None
    message = "lifecycle.suspend is true; the volume and its checkpoints are kept"
    cleared_restarts = forget_gang(s.restarts)
    if s.trainers:
        return Decision(
            Phase.SUSPENDED,
            Reason.SUSPENDED,
            message,
            attempt=s.attempt + 1,
            restarts=cleared_restarts,
            needs_live=True,
            requeue_after_seconds=0.0,
        )
    actions = objects.pod_deletions(s.observation.pods, s)
    return Decision(
        Phase.SUSPENDED,
        Reason.SUSPENDED,
        message,
        actions=actions,
        restarts=cleared_restarts,
        needs_live=bool(actions),
        requeue_after_seconds=ENDING_SECONDS if s.observation.pods else None,
    )


def refuse_invalid_job(s: ObservedState) -> Decision | None:
    """A job that cannot work creates nothing. Newer rules do not stop a job that was accepted before."""
    if s.validation.is_accepted:
        return None
    was_accepted = any(
        condition.type is ConditionType.ACCEPTED and condition.status is ConditionStatus.TRUE
        for condition in s.status.conditions
    )
    if was_accepted and s.observation.job.spec is not None and s.validation.layout is not None:
        return None
    phase = s.status.phase if was_accepted and s.status.phase is not None else Phase.PENDING
    # No watch shows that its profile was corrected.
    seconds = None if s.observation.job.is_profile_recorded else REFUSED_SECONDS
    return Decision(phase, Reason.INVALID, "the job was not accepted", requeue_after_seconds=seconds)


def await_profile(s: ObservedState) -> Decision | None:
    """A job without its profile is no job yet: nothing says what its pods should be."""
    if s.observation.job.missing_profile is None:
        return None
    [problem] = s.validation.problems
    return Decision(
        s.status.phase or Phase.PENDING,
        Reason.PROFILE_MISSING,
        problem.message,
        requeue_after_seconds=REFUSED_SECONDS,
    )


def record_profile(s: ObservedState) -> Decision | None:
    """The values of the profile are written before anything is made of them: it may change or go the next moment."""
    profile = s.observation.job.profile
    if profile is None or s.observation.job.is_profile_recorded:
        return None
    return Decision(
        restarting_or_pending(s),
        Reason.PROFILE_TAKEN,
        f"the job has the values of {profile.kind} {profile.name} from now on",
        requeue_after_seconds=0.0,
    )


def fail_at_deadline(s: ObservedState) -> Decision | None:
    """The job has been active for longer than it may."""
    seconds_left = seconds_to_deadline(s)
    if seconds_left is None or seconds_left > 0 or s.has_gang_succeeded:
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


def replace_outdated_engines(s: ObservedState) -> Decision | None:
    """Engines with a deleted Secret's value end before a new Secret is made: later they look like others."""
    actions = objects.pod_deletions(objects.outdated_engines(s), s)
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
        events=_deletion_events(actions, s),
    )


def recover_failed_pods(s: ObservedState) -> Decision | None:
    """Something broke: the recovery ladder says what is replaced and what it costs."""
    failed_pods = find_failed_pods(s)
    if not failed_pods:
        return None
    verdict = pending_verdict(s, failed_pods)
    return plan_recovery(s, failed_pods) if verdict is None else _await_verdict(s, verdict)


def complete_job(s: ObservedState) -> Decision | None:
    """Every rank of every trainer pod has ended well. Engines never end, and are not awaited."""
    if not s.has_gang_succeeded:
        return None
    restarts, failure = last_restarts(s)
    reason, message = _success_reason(s)
    return Decision(
        Phase.SUCCEEDED,
        reason,
        message,
        restarts=restarts,
        failure=failure,
        needs_live=True,
        pods_created=True,
    )


def _success_reason(s: ObservedState) -> tuple[Reason, str]:
    if s.run_progress is None or StatusMeasure.STOPPED_EARLY not in s.run_progress.measures:
        return Reason.COMPLETED, "every rank has finished"
    return Reason.STOPPED_EARLY, (
        f"stopped early at step {s.run_progress.step}, where evaluations had not improved for as long as "
        "training.earlyStop says"
    )


def delete_old_gang(s: ObservedState) -> Decision | None:
    """Pods of another attempt are deleted and waited for: two gangs would write to one volume."""
    if not s.old_pods:
        return None
    actions = objects.pod_deletions(s.old_pods, s, objects.BROKEN_GANG_SECONDS)
    return Decision(
        restarting_or_pending(s),
        Reason.OLD_PODS_LEFT if s.refusal is None else Reason.DELETION_REFUSED,
        s.refusal or _ending_message(s),
        actions=actions,
        needs_live=bool(actions),
        requeue_after_seconds=ENDING_SECONDS,
        events=_deletion_events(actions, s),
    )


def hold_back_gang(s: ObservedState) -> Decision | None:
    """Nothing may be created yet: pods of an earlier job of this name are there, or the gang scheduler is missing."""
    wait_reason = find_wait_reason(s)
    if wait_reason.reason not in (Reason.NAME_TAKEN, Reason.GANG_API_MISSING) or s.is_gang_running:
        return None
    return Decision(
        restarting_or_pending(s), wait_reason.reason, wait_reason.message, requeue_after_seconds=REFUSED_SECONDS
    )


def ensure_objects(s: ObservedState) -> Decision | None:
    """Create missing objects, and delete pods whose failure has been charged."""
    leaving_pods = (
        *objects.charged_pods(s),
        *objects.spent_engines(s),
        *objects.yielding_spares(s),
        *s.unplanned_pods,
    )
    deletes = objects.pod_deletions(leaving_pods, s)
    creations = objects.missing_objects(s)
    is_more = len(creations) == objects.CREATED_AT_ONCE and s.refusal is None
    is_restart = s.attempt > 0 or bool(s.ladder.replacing)
    is_running = s.is_gang_running and not objects.charged_pods(s)
    started_trainers = objects.count_created_pods(creations, PodRole.TRAINER)
    is_whole = (started_trainers if s.refusal is None else 0) >= len(objects.missing_places(s))
    wait_reason = _running_reason(s) if is_running else find_wait_reason(s)
    return Decision(
        Phase.RUNNING if is_running else restarting_or_pending(s),
        wait_reason.reason,
        wait_reason.message,
        actions=(*deletes, *creations),
        restarts=_settle_restarts(s, is_whole=is_whole),
        pods_created=is_whole,
        # The first gang of all can have no other beside it. Where pods hold the value of the Secret, the live decision
        # also checks that the Secret exists.
        needs_live=bool(deletes)
        or (is_restart and started_trainers > 0)
        or (s.observation.holds_secret and objects.has_secret_creation(creations)),
        requeue_after_seconds=0.0 if is_more else _requeue_seconds(s, is_running=is_running),
        events=_deletion_events(deletes, s),
    )


GUARDS: tuple[Guard, ...] = (
    leave_deleted_job,
    clean_up_finished_job,
    suspend_job,
    await_profile,
    refuse_invalid_job,
    record_profile,
    fail_at_deadline,
    replace_outdated_engines,
    recover_failed_pods,
    complete_job,
    delete_old_gang,
    hold_back_gang,
    ensure_objects,
)


def _await_verdict(s: ObservedState, verdict: Verdict) -> Decision:
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


def _keeps_claim(s: ObservedState) -> bool:
    spec = s.observation.job.spec
    return spec is not None and spec.storage.claim_name is None and spec.storage.reclaim is Reclaim.RETAIN


def _seconds_to_live(s: ObservedState) -> float | None:
    spec = s.observation.job.spec
    ttl = None if spec is None else spec.lifecycle.ttl_seconds_after_finished
    if ttl is None:
        return None
    return max(0.0, ttl - seconds_since(parse_time(s.status.completion_time), s.now))


def seconds_to_deadline(s: ObservedState) -> float | None:
    """Seconds of activity that are left; None without a deadline."""
    spec, _ = spec_and_layout(s)
    limit = spec.lifecycle.active_deadline_seconds
    if limit is None:
        return None
    suspended_seconds = 0.0 if s.status.goodput is None else s.status.goodput.suspended_seconds
    return limit - (seconds_since(job_start_time(s), s.now) - suspended_seconds - _still_suspended_seconds(s))


def _still_suspended_seconds(s: ObservedState) -> float:
    """Seconds of a suspension that ends with this reconcile."""
    pause = next((condition for condition in s.status.conditions if condition.type is ConditionType.SUSPENDED), None)
    if pause is None or pause.status is not ConditionStatus.TRUE:
        return 0.0
    return seconds_since(parse_time(pause.last_transition_time), s.now)


# --- the gang as it is ------------------------------------------------------------------------------------------------


def _settle_restarts(s: ObservedState, *, is_whole: bool) -> Restarts:
    """Mark the gang as whole in the restarts, and its restart as over once all of its pods are ready."""
    spec, _ = spec_and_layout(s)
    gang = gang_report(s)
    restarts = restarts_with_state(
        s.restarts, state_after_report(gang, recovery_state(s.restarts, spec.lifecycle.backoff_limit))
    )
    changes: dict[str, object] = {"gang_was_whole": s.ladder.gang_was_whole or is_whole}
    if gang.is_ready:
        changes["start_after"] = None
    return restarts.model_copy(update={"ladder": restarts.ladder.model_copy(update=changes)})


def _running_reason(s: ObservedState) -> WaitReason:
    ending = next((pod for _, pod in sorted(s.trainers.items()) if pod.is_terminating), None)
    if ending is not None:
        return WaitReason(Reason.POD_ENDING, f"{ending.name} has been asked to end")
    return find_engine_wait_reason(s) or WaitReason(Reason.ALL_PODS_RUN, f"every trainer pod runs{_spares_text(s)}")


def _spares_text(s: ObservedState) -> str:
    spec, layout = spec_and_layout(s)
    if spec.resources.spares == 0:
        return ""
    running = sum(pod.phase is PodPhase.RUNNING for pod in s.trainers.values())
    return f"; {max(0, running - layout.nodes)} of {spec.resources.spares} spares run beside them"


def _ending_message(s: ObservedState) -> str:
    ending = (pod for pod in s.old_pods if pod.is_terminating)
    stuck = next((pod for pod in ending if seconds_since(pod.ends_by, s.now) >= KUBELET_SECONDS), None)
    if stuck is None:
        return "waiting for the pods of the last attempt to end"
    return (
        f"{stuck.name} should have ended by {format_time(stuck.ends_by or s.now)}, and node {stuck.node} does not say "
        "that it has; the next gang starts when it has, or when the node is known to be lost"
    )


def _deletion_events(deletes: tuple[Delete, ...], s: ObservedState) -> tuple[Event, ...]:
    """Return the events of deletions that nothing else in the status shows."""
    engines, unplanned = {pod.uid for pod in s.rollouts}, {pod.uid for pod in s.unplanned_pods}
    forced = [
        Event(
            Severity.WARNING,
            EventReason.POD_FORCE_DELETED,
            f"{deletion.ref.name} was deleted without its node, which is lost",
        )
        for deletion in deletes
        if deletion.is_forced
    ]
    replaced = [
        Event(
            Severity.WARNING,
            EventReason.ROLLOUT_REPLACED,
            f"engine {deletion.ref.name} has lost its place and is replaced",
        )
        for deletion in deletes
        if deletion.ref.uid in engines
    ]
    unknown = [
        Event(
            Severity.WARNING,
            EventReason.UNKNOWN_POD_DELETED,
            f"{deletion.ref.name} has the marks of this job, which did not create it, and was deleted",
        )
        for deletion in deletes
        if deletion.ref.uid in unplanned
    ]
    return (*forced, *replaced, *unknown)


def _poll_seconds(s: ObservedState) -> float:
    started = (pod for pod in s.trainers.values() if pod.phase is not PodPhase.PENDING)
    youngest = min(seconds_since(pod.started_at, s.now) for pod in started)
    return min([POLL_SECONDS, *(age - youngest for age in POLL_AGES if age > youngest)])


def _requeue_seconds(s: ObservedState, *, is_running: bool) -> float | None:
    engine_waits = [objects.engine_wait_seconds(pod, s) for pod in s.rollouts if objects.is_lost_engine(pod, s)]
    is_ending = any(pod.is_terminating for pod in (*s.trainers.values(), *s.rollouts))
    return shortest_wait(
        seconds_until(s.ladder.start_after, s.now) or None,
        _poll_seconds(s) if is_running else None,
        # Only a poll tells which pods are spares.
        ENDING_SECONDS if objects.needs_room_of_spare(s) and len(s.trainers) > 1 else None,
        REFUSED_SECONDS if s.refusal is not None else None,
        ENDING_SECONDS if is_ending else None,
        *engine_waits,
    )
