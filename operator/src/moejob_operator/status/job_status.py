"""The whole status, put together from its parts; and when a change is worth a write.

The phase that kubectl shows is the decision's: planning/phase_guards.py chooses it.
"""

from __future__ import annotations

from moejob_api.job.status import AppliedProfile, LayoutStatus, Phase, Status
from moejob_operator.planning.decision import Decision
from moejob_operator.planning.observed_state import ObservedState, job_start_time
from moejob_operator.planning.timestamps import format_time, seconds_since
from moejob_operator.status.conditions import build_conditions
from moejob_operator.status.display import build_display
from moejob_operator.status.goodput import account_goodput
from moejob_operator.status.obstacle import find_obstacle
from moejob_operator.status.progress import progress_to_write
from moejob_operator.status.replicas import replica_statuses

# The pods of a large gang, or of a thousand gangs, start within seconds of each other: a write for each would be waste.
SETTLING_SECONDS = 15.0


def next_status(s: ObservedState, decision: Decision) -> Status:
    """The status that a decision leads to."""
    before = s.status
    replica_counts = replica_statuses(s, decision)
    if before.phase is not None and before.phase.is_finished:
        return before.model_copy(update={"replica_statuses": replica_counts})
    new_progress = progress_to_write(s, decision)
    is_finished = decision.phase is not None and decision.phase.is_finished
    after = Status(
        phase=decision.phase,
        conditions=build_conditions(s, decision, new_progress),
        observed_generation=s.observation.job.generation,
        profile=_recorded_profile(s),
        attempt=s.attempt if decision.attempt is None else decision.attempt,
        restarts=s.restarts if decision.restarts is None else decision.restarts,
        layout=_layout_status(s),
        replica_statuses=replica_counts,
        progress=new_progress,
        display=build_display(s, decision, new_progress),
        goodput=account_goodput(s, decision, new_progress),
        start_time=_start_time(s, decision),
        completion_time=format_time(s.now) if is_finished else None,
        last_failure=decision.failure or before.last_failure,
    )
    after = after.model_copy(update={"why": find_obstacle(s, after)})
    if _unsettled_seconds(s) > 0 and before == after.model_copy(update={"replica_statuses": before.replica_statuses}):
        return before
    return after


def _recorded_profile(s: ObservedState) -> AppliedProfile | None:
    """The values that an accepted job has from its profile. Until then the profile may be corrected."""
    return s.observation.job.profile if s.validation.is_accepted else s.status.profile


def settles_after_seconds(s: ObservedState, status: Status) -> float | None:
    """Return when to look again because counts were held back; None when they were not."""
    if status is not s.status:
        return None
    return _unsettled_seconds(s) or None


def _unsettled_seconds(s: ObservedState) -> float:
    """Seconds until the pods have not changed for long enough to be counted."""
    newest = max((pod.changed_at for pod in s.observation.pods if pod.changed_at is not None), default=None)
    return 0.0 if newest is None else max(0.0, SETTLING_SECONDS - seconds_since(newest, s.now))


def _start_time(s: ObservedState, decision: Decision) -> str | None:
    created = job_start_time(s)
    if created is not None:
        return format_time(created)
    return format_time(s.now) if decision.pods_created and decision.phase is not Phase.SUCCEEDED else None


def _layout_status(s: ObservedState) -> LayoutStatus | None:
    sizes, rollout = s.validation.layout, s.validation.rollout
    if sizes is None:
        return s.status.layout
    rollout_gpus = 0 if rollout is None else rollout.gpus
    spares = 0 if s.observation.job.spec is None else s.observation.job.spec.resources.spares
    return LayoutStatus(
        gpus=sizes.gpus + spares * sizes.gpus_per_pod + rollout_gpus,
        nodes=sizes.nodes,
        spares=spares,
        gpus_per_pod=sizes.gpus_per_pod,
        tensor=sizes.tensor,
        pipeline=sizes.pipeline,
        virtual_pipeline=sizes.virtual_pipeline,
        context=sizes.context,
        data=sizes.data,
        expert=sizes.expert,
        expert_tensor=sizes.expert_tensor,
        expert_data=sizes.expert_data,
        rollout_gpus=rollout_gpus,
        memory_per_gpu_bytes=s.validation.memory_per_gpu_bytes,
    )
