"""The number of pods of each role in each state."""

from __future__ import annotations

from collections.abc import Iterable

from moejob_api.contract.pods import PodRole
from moejob_api.job.status import ReplicaStatus, Status
from moejob_operator.observed import Pod, PodPhase
from moejob_operator.planning.decision import Decision
from moejob_operator.planning.objects import count_created_pods
from moejob_operator.planning.observed_state import ObservedState


def replica_statuses(s: ObservedState, decision: Decision) -> tuple[ReplicaStatus, ...]:
    """One entry for each role that the job has."""
    sizes, rollout = s.validation.layout, s.validation.rollout
    if sizes is None:
        return s.status.replica_statuses
    is_next_attempt = decision.attempt is not None and decision.attempt != s.attempt
    # Pods that this very step creates need no second write to be counted.
    created = {role: count_created_pods(decision.actions, role) if s.refusal is None else 0 for role in PodRole}
    trainers = () if is_next_attempt else s.trainers.values()
    spec = s.observation.job.spec
    desired = sizes.nodes + (0 if spec is None else spec.resources.spares)
    gang = _count_replicas(PodRole.TRAINER, desired, trainers, created[PodRole.TRAINER])
    engines = rollout.engines if rollout is not None and rollout.gpus else 0
    statuses = (
        (gang, _count_replicas(PodRole.ROLLOUT, engines, s.rollouts, created[PodRole.ROLLOUT])) if engines else (gang,)
    )
    if s.status.phase is None or not s.status.phase.is_finished:
        return statuses
    return tuple(_keep_ends(counted, s.status) for counted in statuses)


def _count_replicas(role: PodRole, desired: int, pods: Iterable[Pod], created: int) -> ReplicaStatus:
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


def _keep_ends(counts: ReplicaStatus, status: Status) -> ReplicaStatus:
    """Return the ends of the pods of a finished job, also when they have been cleared away since."""
    before = next((entry for entry in status.replica_statuses if entry.role == counts.role), counts)
    return counts.model_copy(
        update={
            "succeeded": max(counts.succeeded, before.succeeded),
            "failed": max(counts.failed, before.failed),
        }
    )
