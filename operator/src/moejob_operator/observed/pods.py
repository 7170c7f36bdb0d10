"""The facts in a pod's API body. Nothing in a body can make this fail: what cannot be read is absent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from pydantic import ValidationError

from moejob_api import api_bodies
from moejob_api.contract.pods import TERMINATION_BYTES, PodRole, TerminationMessage
from moejob_operator.cluster import Raw
from moejob_operator.observed.ownership import PodPlace

_MESSAGE_CHARACTERS = 2048
# The reason for which the node controller takes pods away.
TAKEN_BY_TAINT = "DeletionByTaintManager"
# Conditions of a pod that is to go: Kubernetes' own, and Kueue's.
_TAKEN_AWAY = ("DisruptionTarget", "TerminationTarget")


class PodPhase(StrEnum):
    """`status.phase` of a pod, as in Kubernetes."""

    PENDING = "Pending"
    RUNNING = "Running"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    UNKNOWN = "Unknown"

    @property
    def has_ended(self) -> bool:
        """Return whether its containers will never run again."""
        return self in (PodPhase.SUCCEEDED, PodPhase.FAILED)


@dataclass(frozen=True, slots=True)
class ContainerEnd:
    """The end of a container. Its message is raw where the launcher left no readable termination message."""

    exit_code: int | None
    reason: str
    termination: TerminationMessage | None
    message: str
    ended_at: datetime | None


@dataclass(frozen=True, slots=True)
class ContainerWait:
    """The reason why a container has not started, in the kubelet's words."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of the job."""

    name: str
    uid: str
    role: PodRole
    attempt: int
    index: int
    phase: PodPhase
    # The Service by which it is found.
    subdomain: str
    node: str | None
    created_at: datetime | None
    started_at: datetime | None
    # Kubernetes sets this to when the grace period ends, not to when the deletion was asked for.
    ends_by: datetime | None
    is_ready: bool
    # Nothing is heard of its node: see `is_unheard`.
    is_unheard: bool
    ready_changed_at: datetime | None
    changed_at: datetime | None
    ended: ContainerEnd | None
    # The end before, where the kubelet restarts a container in the same pod, as it does with an engine; the message is
    # the last line of the log.
    ended_before: ContainerEnd | None
    # How often the kubelet has restarted its first container.
    restarts: int
    waiting: ContainerWait | None
    unschedulable: str | None
    is_gated: bool
    # The reason of the condition by which the cluster takes the pod away.
    disruption: str | None
    # The pod's own reason and message, such as Evicted.
    reason: str
    message: str

    @property
    def is_terminating(self) -> bool:
        """Return whether its deletion was requested."""
        return self.ends_by is not None


def read_pod(raw: Raw, place: PodPlace) -> Pod:
    """The facts of the pod in one place."""
    about, status = api_bodies.object_metadata(raw), api_bodies.as_mapping(raw.get("status"))
    ready = api_bodies.find_condition(status, "Ready")
    scheduled = api_bodies.find_condition(status, "PodScheduled")
    is_waiting_for_node = scheduled.get("status") == "False"
    spec = api_bodies.as_mapping(raw.get("spec"))
    return Pod(
        name=api_bodies.as_text(about.get("name")),
        uid=api_bodies.as_text(about.get("uid")),
        role=place.role,
        attempt=place.attempt,
        index=place.index,
        phase=_read_phase(status),
        subdomain=api_bodies.as_text(spec.get("subdomain")),
        node=api_bodies.as_text(spec.get("nodeName")) or None,
        created_at=api_bodies.as_time(about.get("creationTimestamp")),
        started_at=_started_at(raw),
        ends_by=api_bodies.as_time(about.get("deletionTimestamp")),
        is_ready=ready.get("status") == "True",
        is_unheard=is_unheard(raw),
        ready_changed_at=api_bodies.as_time(ready.get("lastTransitionTime")),
        changed_at=_changed_at(raw, status),
        ended=_container_end(_container_states(raw)),
        ended_before=_container_end(_container_states(raw, "lastState"), api_bodies.last_line),
        restarts=api_bodies.read_restarts(status),
        waiting=_container_wait(raw),
        unschedulable=_read_message(scheduled)
        if is_waiting_for_node and scheduled.get("reason") == "Unschedulable"
        else None,
        is_gated=is_waiting_for_node and scheduled.get("reason") == "SchedulingGated",
        disruption=_disruption_reason(status),
        reason=api_bodies.as_text(status.get("reason")),
        message=_read_message(status),
    )


def is_unheard(raw: Raw) -> bool:
    """Return whether the cluster calls a pod unready whose containers are ready.

    No kubelet reports this: the node controller marks the pods of a silent node so.
    """
    status = api_bodies.as_mapping(raw.get("status"))
    statuses = {kind: api_bodies.find_condition(status, kind).get("status") for kind in ("Ready", "ContainersReady")}
    return statuses == {"Ready": "False", "ContainersReady": "True"}


def is_taken_by_taint(raw: Raw) -> bool:
    """Return whether the cluster deletes a pod because of a taint of its node."""
    return _disruption_reason(api_bodies.as_mapping(raw.get("status"))) == TAKEN_BY_TAINT


def _disruption_reason(status: Raw) -> str | None:
    conditions = (api_bodies.find_condition(status, kind) for kind in _TAKEN_AWAY)
    return next(
        (api_bodies.as_text(condition.get("reason")) for condition in conditions if condition.get("status") == "True"),
        None,
    )


def _read_phase(status: Raw) -> PodPhase:
    phase = api_bodies.as_text(status.get("phase"))
    # A pod that was created this moment has no phase yet.
    return PodPhase(phase or PodPhase.PENDING) if not phase or phase in list(PodPhase) else PodPhase.UNKNOWN


def _read_message(holder: Raw) -> str:
    return api_bodies.as_text(holder.get("message"))[:_MESSAGE_CHARACTERS]


def _container_states(raw: Raw, which: str = "state", *, with_sidecars: bool = False) -> tuple[Raw, ...]:
    """Present or last states of the containers, init containers first: those are what a pod waits for first.

    Sidecars end, and start again, without a word about the pod: the kubelet stops them once the trainer has ended.
    """
    spec, status = api_bodies.as_mapping(raw.get("spec")), api_bodies.as_mapping(raw.get("status"))
    sidecars = (
        set()
        if with_sidecars
        else {
            api_bodies.as_text(container.get("name"))
            for container in api_bodies.as_mappings(spec.get("initContainers"))
            if container.get("restartPolicy") == "Always"
        }
    )
    containers = (
        *(
            container
            for container in api_bodies.as_mappings(status.get("initContainerStatuses"))
            if api_bodies.as_text(container.get("name")) not in sidecars
        ),
        *api_bodies.as_mappings(status.get("containerStatuses")),
    )
    return tuple(api_bodies.as_mapping(container.get(which)) for container in containers)


def _started_at(raw: Raw) -> datetime | None:
    for state in _container_states(raw):
        for kind in ("running", "terminated"):
            started = api_bodies.as_time(api_bodies.as_mapping(state.get(kind)).get("startedAt"))
            if started is not None:
                return started
    return None


def _changed_at(raw: Raw, status: Raw) -> datetime | None:
    """Return when the pod last changed by its body: to the second, by the clocks of the API server and of its node."""
    times = [
        api_bodies.as_time(api_bodies.object_metadata(raw).get("creationTimestamp")),
        _started_at(raw),
        *(
            api_bodies.as_time(condition.get("lastTransitionTime"))
            for condition in api_bodies.as_mappings(status.get("conditions"))
        ),
        *(
            api_bodies.as_time(api_bodies.as_mapping(state.get("terminated")).get("finishedAt"))
            for state in _container_states(raw)
        ),
    ]
    return max((time for time in times if time is not None), default=None)


def _container_end(
    states: tuple[Raw, ...], read_text: Callable[[object], str] = api_bodies.as_text
) -> ContainerEnd | None:
    ends = [api_bodies.as_mapping(state["terminated"]) for state in states if "terminated" in state]
    # The first that failed is to blame; an init container that succeeded is no end.
    failed = next((end for end in ends if end.get("exitCode") != 0), None)
    end = failed if failed is not None else ends[-1] if ends else None
    if end is None:
        return None
    message = read_text(end.get("message"))[:TERMINATION_BYTES]
    termination = _parse_termination(message)
    return ContainerEnd(
        exit_code=api_bodies.as_integer(end.get("exitCode")),
        reason=api_bodies.as_text(end.get("reason")),
        termination=termination,
        message=(termination.message if termination is not None else message)[:_MESSAGE_CHARACTERS],
        ended_at=api_bodies.as_time(end.get("finishedAt")),
    )


def _parse_termination(message: str) -> TerminationMessage | None:
    try:
        return TerminationMessage.model_validate_json(message)
    except ValidationError:
        return None


def _container_wait(raw: Raw) -> ContainerWait | None:
    # A sidecar whose image cannot be pulled keeps the trainer from starting; beside a running trainer it keeps nothing.
    is_started = _read_phase(api_bodies.as_mapping(raw.get("status"))) is not PodPhase.PENDING
    for state in _container_states(raw, with_sidecars=not is_started):
        waiting = api_bodies.as_mapping(state.get("waiting"))
        if waiting.get("reason"):
            return ContainerWait(api_bodies.as_text(waiting.get("reason")), _read_message(waiting))
    return None
