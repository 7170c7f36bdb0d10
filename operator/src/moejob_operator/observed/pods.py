"""The facts in a pod's API body. Nothing in a body can make this fail: what cannot be read is absent."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum

from pydantic import ValidationError

from moejob_api.contract.pods import TERMINATION_BYTES, LastWord, Role
from moejob_operator.cluster import Raw
from moejob_operator.observed import reading
from moejob_operator.observed.ownership import PodPlace

_MESSAGE_CHARACTERS = 2048
# The reason for which the node controller takes pods away.
TAKEN_BY_TAINT = "DeletionByTaintManager"
# Conditions of a pod that is to go: Kubernetes' own, and Kueue's.
_TAKEN_AWAY = ("DisruptionTarget", "TerminationTarget")


class PodPhase(StrEnum):
    """As in Kubernetes."""

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
class Ended:
    """The end of a container. Its message is raw where the launcher left no readable termination message."""

    exit_code: int | None
    reason: str
    word: LastWord | None
    message: str
    at: datetime | None


@dataclass(frozen=True, slots=True)
class Waiting:
    """The reason why a container has not started, in the kubelet's words."""

    reason: str
    message: str


@dataclass(frozen=True, slots=True)
class Pod:
    """One pod of the job."""

    name: str
    uid: str
    role: Role
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
    ended: Ended | None
    # The end before, where the kubelet restarts a container in the same pod, as it does with an engine; the message is
    # the last line of the log.
    ended_before: Ended | None
    waiting: Waiting | None
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


def pod(raw: Raw, place: PodPlace) -> Pod:
    """The facts of the pod in one place."""
    about, status = reading.metadata(raw), reading.mapping(raw.get("status"))
    ready = reading.condition(status, "Ready")
    scheduled = reading.condition(status, "PodScheduled")
    is_waiting_for_node = scheduled.get("status") == "False"
    spec = reading.mapping(raw.get("spec"))
    return Pod(
        name=reading.text(about.get("name")),
        uid=reading.text(about.get("uid")),
        role=place.role,
        attempt=place.attempt,
        index=place.index,
        phase=_phase(status),
        subdomain=reading.text(spec.get("subdomain")),
        node=reading.text(spec.get("nodeName")) or None,
        created_at=reading.time(about.get("creationTimestamp")),
        started_at=_started_at(status),
        ends_by=reading.time(about.get("deletionTimestamp")),
        is_ready=ready.get("status") == "True",
        is_unheard=is_unheard(raw),
        ready_changed_at=reading.time(ready.get("lastTransitionTime")),
        changed_at=_changed_at(raw, status),
        ended=_ended(_states(status)),
        ended_before=_ended(_states(status, "lastState"), reading.last_line),
        waiting=_waiting(status),
        unschedulable=_message(scheduled)
        if is_waiting_for_node and scheduled.get("reason") == "Unschedulable"
        else None,
        is_gated=is_waiting_for_node and scheduled.get("reason") == "SchedulingGated",
        disruption=_disruption(status),
        reason=reading.text(status.get("reason")),
        message=_message(status),
    )


def is_unheard(raw: Raw) -> bool:
    """Return whether the cluster calls a pod unready whose containers are ready.

    No kubelet reports this: the node controller marks the pods of a silent node so.
    """
    status = reading.mapping(raw.get("status"))
    said = {kind: reading.condition(status, kind).get("status") for kind in ("Ready", "ContainersReady")}
    return said == {"Ready": "False", "ContainersReady": "True"}


def taken_by_taint(raw: Raw) -> bool:
    """Return whether the cluster deletes a pod because of a taint of its node."""
    return _disruption(reading.mapping(raw.get("status"))) == TAKEN_BY_TAINT


def _disruption(status: Raw) -> str | None:
    found = (reading.condition(status, kind) for kind in _TAKEN_AWAY)
    return next((reading.text(taken.get("reason")) for taken in found if taken.get("status") == "True"), None)


def _phase(status: Raw) -> PodPhase:
    phase = reading.text(status.get("phase"))
    # A pod that was created this moment has no phase yet.
    return PodPhase(phase or PodPhase.PENDING) if not phase or phase in list(PodPhase) else PodPhase.UNKNOWN


def _message(holder: Raw) -> str:
    return reading.text(holder.get("message"))[:_MESSAGE_CHARACTERS]


def _states(status: Raw, which: str = "state") -> tuple[Raw, ...]:
    """Present or last states of the containers, init containers first: those are what a pod waits for first."""
    containers = (
        *reading.mappings(status.get("initContainerStatuses")),
        *reading.mappings(status.get("containerStatuses")),
    )
    return tuple(reading.mapping(container.get(which)) for container in containers)


def _started_at(status: Raw) -> datetime | None:
    for state in _states(status):
        for kind in ("running", "terminated"):
            started = reading.time(reading.mapping(state.get(kind)).get("startedAt"))
            if started is not None:
                return started
    return None


def _changed_at(raw: Raw, status: Raw) -> datetime | None:
    """Return when the pod last changed by its body: to the second, by the clocks of the API server and of its node."""
    times = [
        reading.time(reading.metadata(raw).get("creationTimestamp")),
        _started_at(status),
        *(reading.time(found.get("lastTransitionTime")) for found in reading.mappings(status.get("conditions"))),
        *(reading.time(reading.mapping(state.get("terminated")).get("finishedAt")) for state in _states(status)),
    ]
    return max((time for time in times if time is not None), default=None)


def _ended(states: tuple[Raw, ...], read: Callable[[object], str] = reading.text) -> Ended | None:
    ends = [reading.mapping(state["terminated"]) for state in states if "terminated" in state]
    # The first that failed is to blame; an init container that succeeded is no end.
    failed = next((end for end in ends if end.get("exitCode") != 0), None)
    end = failed if failed is not None else ends[-1] if ends else None
    if end is None:
        return None
    message = read(end.get("message"))[:TERMINATION_BYTES]
    word = _last_word(message)
    return Ended(
        exit_code=reading.whole(end.get("exitCode")),
        reason=reading.text(end.get("reason")),
        word=word,
        message=(word.message if word is not None else message)[:_MESSAGE_CHARACTERS],
        at=reading.time(end.get("finishedAt")),
    )


def _last_word(message: str) -> LastWord | None:
    try:
        return LastWord.model_validate_json(message)
    except ValidationError:
        return None


def _waiting(status: Raw) -> Waiting | None:
    for state in _states(status):
        waiting = reading.mapping(state.get("waiting"))
        if waiting.get("reason"):
            return Waiting(reading.text(waiting.get("reason")), _message(waiting))
    return None
