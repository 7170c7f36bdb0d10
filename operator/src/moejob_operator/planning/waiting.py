"""The reason why the gang does not run yet: first whatever a person could do something about."""

from __future__ import annotations

from dataclasses import dataclass

from moejob_operator.children.gangs import missing_api
from moejob_operator.observed import Ended, Pod, VolumeClaimPhase
from moejob_operator.planning.decision import Reason
from moejob_operator.planning.observed_state import ObservedState, gang_of
from moejob_operator.planning.timestamps import seconds_until

# Reasons that a kubelet gives in every start.
_USUAL = frozenset({"ContainerCreating", "PodInitializing"})
# What the scheduler says of a pod whose volume is not there yet.
_UNBOUND = "unbound immediate PersistentVolumeClaims"


@dataclass(frozen=True, slots=True)
class Hold:
    """The reason of a wait. `reason` is ours, or the kubelet's own word such as ImagePullBackOff."""

    reason: str
    message: str


def hold(s: ObservedState) -> Hold:
    """Return the hold of a gang: the thing it waits for."""
    pods = tuple(s.trainers[index] for index in sorted(s.trainers))
    return (
        _refused(s)
        or _gang_api(s)
        or _taken_name(s)
        or _delay(s)
        or _image(pods)
        or _node(pods)
        or _claim(s)
        or _queue(pods)
        or Hold(Reason.STARTING, "waiting for the pods to start")
    )


def hold_beside_gang(s: ObservedState) -> Hold | None:
    """Return the hold beside a gang that runs: an object the API server refused, or one that engines wait for."""
    return _refused(s) or _image(s.rollouts) or _node(s.rollouts)


def _refused(s: ObservedState) -> Hold | None:
    if s.refusal is None:
        return None
    reason = Reason.QUOTA_EXCEEDED if "exceeded quota" in s.refusal else Reason.CREATION_REFUSED
    return Hold(reason, s.refusal)


def _gang_api(s: ObservedState) -> Hold | None:
    gang = gang_of(s)
    api = missing_api(gang, s.setting.gang_apis)
    if api is None:
        return None
    return Hold(
        Reason.GANG_API_MISSING,
        f"lifecycle.gang {gang} needs {api}, which this cluster does not serve; install it, or create the job anew "
        "with another gang",
    )


def _taken_name(s: ObservedState) -> Hold | None:
    if not s.seen.earlier_pods:
        return None
    return Hold(
        Reason.NAME_TAKEN,
        f"pod {s.seen.earlier_pods[0]} belongs to an earlier job of this name; waiting until it is gone",
    )


def _delay(s: ObservedState) -> Hold | None:
    if seconds_until(s.ladder.start_after, s.now) <= 0:
        return None
    return Hold(Reason.BACKING_OFF, f"starts again at {s.ladder.start_after}")


def _image(pods: tuple[Pod, ...]) -> Hold | None:
    for pod in pods:
        if pod.waiting is not None and pod.waiting.reason not in _USUAL:
            said = pod.waiting.message if pod.ended_before is None else _end(pod.ended_before)
            return Hold(pod.waiting.reason, f"{pod.name}: {said}" if said else pod.name)
    return None


def _end(end: Ended) -> str:
    """Return the reason of a container's restart, which the kubelet's own message lacks."""
    return f"ended with exit code {end.exit_code}: {end.message}" if end.message else f"exit code {end.exit_code}"


def _node(pods: tuple[Pod, ...]) -> Hold | None:
    for pod in pods:
        # Until its claim is bound a pod fits no node, whatever room there is: it waits for the claim.
        if pod.unschedulable and _UNBOUND not in pod.unschedulable:
            return Hold(Reason.UNSCHEDULABLE, f"{pod.name}: {pod.unschedulable}")
    return None


def _claim(s: ObservedState) -> Hold | None:
    for claim in s.seen.claims:
        if claim.phase is VolumeClaimPhase.LOST:
            return Hold(Reason.CLAIM_LOST, f"the volume of claim {claim.name} is gone")
        if claim.phase is VolumeClaimPhase.PENDING and any(pod.node is None for pod in s.trainers.values()):
            return Hold(Reason.CLAIM_PENDING, f"claim {claim.name} is not bound to a volume yet")
    return None


def _queue(pods: tuple[Pod, ...]) -> Hold | None:
    gated = next((pod for pod in pods if pod.is_gated), None)
    return None if gated is None else Hold(Reason.QUEUED, f"{gated.name} waits for its queue to admit it")
