"""The number of pods of each role in each state."""

from __future__ import annotations

from collections.abc import Iterable

from moejob_api.contract.pods import Role
from moejob_api.job.status import ReplicaStatus, Status
from moejob_operator.observed import Pod, PodPhase
from moejob_operator.planning.decision import Decision
from moejob_operator.planning.objects import pods_among
from moejob_operator.planning.observed_state import ObservedState


def replica_statuses(s: ObservedState, decision: Decision) -> tuple[ReplicaStatus, ...]:
    """One entry for each role that the job has."""
    sizes, rollout = s.validation.layout, s.validation.rollout
    if sizes is None:
        return s.status.replica_statuses
    is_next_attempt = decision.attempt is not None and decision.attempt != s.attempt
    # Pods that this very step creates need no second write to be counted.
    created = {role: pods_among(decision.actions, role) if s.refusal is None else 0 for role in Role}
    trainers = () if is_next_attempt else s.trainers.values()
    gang = _counted(Role.TRAINER, sizes.nodes, trainers, created[Role.TRAINER])
    engines = rollout.engines if rollout is not None and rollout.gpus else 0
    found = (gang, _counted(Role.ROLLOUT, engines, s.rollouts, created[Role.ROLLOUT])) if engines else (gang,)
    if s.status.phase is None or not s.status.phase.is_finished:
        return found
    return tuple(_kept(counted, s.status) for counted in found)


def _counted(role: Role, desired: int, pods: Iterable[Pod], created: int) -> ReplicaStatus:
    pods = tuple(pods)
    phases = [pod.phase for pod in pods]
    return ReplicaStatus(
        role=role.value,
        desired=desired,
        pending=phases.count(PodPhase.PENDING) + created,
        running=phases.count(PodPhase.RUNNING),
        ready=sum(pod.is_ready for pod in pods),
        succeeded=phases.count(PodPhase.SUCCEEDED),
        failed=phases.count(PodPhase.FAILED),
    )


def _kept(counted: ReplicaStatus, status: Status) -> ReplicaStatus:
    """Return the ends of the pods of a finished job, also when they have been cleared away since."""
    before = next((found for found in status.replica_statuses if found.role == counted.role), counted)
    return counted.model_copy(
        update={
            "succeeded": max(counted.succeeded, before.succeeded),
            "failed": max(counted.failed, before.failed),
        }
    )
