"""The reason why the gang does not run yet: reasons that a person can remove come first."""

from __future__ import annotations

from dataclasses import dataclass

from moejob_api.contract.pods import engine_ends_text, parse_engine_ends
from moejob_operator.children.gangs import GangApi, missing_api, volcano_scheduler
from moejob_operator.observed import ContainerEnd, Pod, PodPhase, VolumeClaimPhase
from moejob_operator.planning.decision import Reason
from moejob_operator.planning.observed_state import ObservedState, gang_scheduler, spec_and_layout
from moejob_operator.planning.timestamps import seconds_until

# Reasons that a kubelet gives in every start.
_USUAL = frozenset({"ContainerCreating", "PodInitializing"})
# What the scheduler says of a pod whose volume is not there yet.
_UNBOUND = "unbound immediate PersistentVolumeClaims"


@dataclass(frozen=True, slots=True)
class WaitReason:
    """The reason of a wait. `reason` is ours, or the kubelet's own word such as ImagePullBackOff."""

    reason: str
    message: str


def find_wait_reason(s: ObservedState) -> WaitReason:
    """Return the hold of a gang: the thing it waits for."""
    pods = tuple(s.trainers[index] for index in sorted(s.trainers))
    return (
        _refused_creation(s)
        or _missing_gang_api(s)
        or _taken_name(s)
        or _backoff_delay(s)
        or _waiting_container(pods)
        or _unschedulable_pod(pods)
        or _unbound_claim(s)
        or _queued_pod(pods)
        or WaitReason(Reason.STARTING, "waiting for the pods to start")
    )


def find_engine_wait_reason(s: ObservedState) -> WaitReason | None:
    """Return the hold-up beside a gang that runs: an object that was refused, or that engines or spares wait for.

    An engine that ends again and again runs for a while in between.
    """
    pods = (*s.rollouts, *(pod for _, pod in sorted(s.trainers.items()) if pod.phase is PodPhase.PENDING))
    return (
        _refused_creation(s)
        or _waiting_container(pods)
        or _unschedulable_pod(pods)
        or _restarted_engine(s.rollouts)
        or _restarted_colocated_engine(s)
    )


def _refused_creation(s: ObservedState) -> WaitReason | None:
    if s.refusal is None:
        return None
    reason = Reason.QUOTA_EXCEEDED if "exceeded quota" in s.refusal else Reason.CREATION_REFUSED
    return WaitReason(reason, s.refusal)


def _missing_gang_api(s: ObservedState) -> WaitReason | None:
    gang = gang_scheduler(s)
    api = missing_api(gang, s.setting.gang_apis)
    if api is None:
        return None
    if api is GangApi.KUEUE and GangApi.VOLCANO in s.setting.gang_apis and s.setting.schedulers is not None:
        spec, _ = spec_and_layout(s)
        return WaitReason(
            Reason.GANG_API_MISSING,
            f"the queues of this cluster are Volcano's, whose scheduler {volcano_scheduler(spec)} is beyond its limits "
            f"({', '.join(s.setting.schedulers) or 'none'}); remove queue, or ask those who run the operator for "
            "limits.schedulers",
        )
    return WaitReason(
        Reason.GANG_API_MISSING,
        f"lifecycle.gang {gang} needs {api}, which this cluster does not serve; install it, or create the job anew "
        "with another gang",
    )


def _taken_name(s: ObservedState) -> WaitReason | None:
    if not s.observation.earlier_pods:
        return None
    return WaitReason(
        Reason.NAME_TAKEN,
        f"pod {s.observation.earlier_pods[0]} belongs to an earlier job of this name; waiting until it is gone",
    )


def _backoff_delay(s: ObservedState) -> WaitReason | None:
    if seconds_until(s.ladder.start_after, s.now) <= 0:
        return None
    return WaitReason(Reason.BACKING_OFF, f"starts again at {s.ladder.start_after}")


def _waiting_container(pods: tuple[Pod, ...]) -> WaitReason | None:
    for pod in pods:
        if pod.waiting is not None and pod.waiting.reason not in _USUAL:
            explanation = pod.waiting.message if pod.ended_before is None else _end_text(pod.ended_before)
            return WaitReason(pod.waiting.reason, f"{pod.name}: {explanation}" if explanation else pod.name)
    return None


def _restarted_engine(engines: tuple[Pod, ...]) -> WaitReason | None:
    for pod in engines:
        if pod.restarts and not pod.is_ready and pod.ended_before is not None:
            ends = engine_ends_text({pod.index: pod.restarts})
            return WaitReason(Reason.ENGINE_ENDS, f"{ends}: {_end_text(pod.ended_before)}")
    return None


def _restarted_colocated_engine(s: ObservedState) -> WaitReason | None:
    """Return the engine that a launcher reports, whose container is the trainer's."""
    reports = [s.observation.progress[pod.uid] for pod in s.trainers.values() if pod.uid in s.observation.progress]
    ends = [parse_engine_ends(report.phase) for report in reports if report.phase is not None]
    return next((WaitReason(Reason.ENGINE_ENDS, text) for text in ends if text), None)


def _end_text(end: ContainerEnd) -> str:
    """Return the reason of a container's restart, which the kubelet's own message lacks."""
    return f"ended with exit code {end.exit_code}: {end.message}" if end.message else f"exit code {end.exit_code}"


def _unschedulable_pod(pods: tuple[Pod, ...]) -> WaitReason | None:
    for pod in pods:
        # Until its claim is bound a pod fits no node, whatever room there is: it waits for the claim.
        if pod.unschedulable and _UNBOUND not in pod.unschedulable:
            return WaitReason(Reason.UNSCHEDULABLE, f"{pod.name}: {pod.unschedulable}")
    return None


def _unbound_claim(s: ObservedState) -> WaitReason | None:
    for claim in s.observation.claims:
        if claim.phase is VolumeClaimPhase.LOST:
            return WaitReason(Reason.CLAIM_LOST, f"the volume of claim {claim.name} is gone")
        if claim.phase is VolumeClaimPhase.PENDING and any(pod.node is None for pod in s.trainers.values()):
            return WaitReason(Reason.CLAIM_PENDING, f"claim {claim.name} is not bound to a volume yet")
    return None


def _queued_pod(pods: tuple[Pod, ...]) -> WaitReason | None:
    gated = next((pod for pod in pods if pod.is_gated), None)
    return None if gated is None else WaitReason(Reason.QUEUED, f"{gated.name} waits for its queue to admit it")
