"""The evidence of a diagnosis: the few facts of API bodies that a reason can lie in. Nothing here raises.

The operator has pods and claims; a user's client has events, queues and nodes beside them, as far as it may read them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from types import MappingProxyType

from moejob_api import api_bodies
from moejob_api.api_bodies import Raw
from moejob_api.contract.pods import Label, PodRole
from moejob_api.job.status import Status

_MESSAGE_CHARACTERS = 2048
# Conditions of a pod that is to go: Kubernetes' own, and Kueue's.
DISRUPTION, EVICTION_BY_KUEUE = "DisruptionTarget", "TerminationTarget"
_NO_COUNTS: Mapping[str, int] = MappingProxyType({})


@dataclass(frozen=True, slots=True)
class JobEvidence:
    """The job. Its status is the newest one: the operator's before it is written."""

    name: str
    namespace: str
    created_at: datetime | None
    deleted_at: datetime | None
    finalizers: tuple[str, ...]
    ttl_seconds: int | None
    status: Status


@dataclass(frozen=True, slots=True)
class ConditionEvidence:
    """One condition of any object."""

    type: str
    status: str
    reason: str
    message: str
    since: datetime | None


@dataclass(frozen=True, slots=True)
class ContainerEvidence:
    """A container that waits, with its image and the end before."""

    name: str
    image: str
    reason: str
    message: str
    last_reason: str
    last_exit_code: int | None
    last_line: str


@dataclass(frozen=True, slots=True)
class PodEvidence:
    """A pod of the job."""

    name: str
    uid: str
    role: str
    attempt: int
    index: int
    phase: str
    node: str
    scheduler: str
    queue: str
    created_at: datetime | None
    ends_by: datetime | None
    conditions: tuple[ConditionEvidence, ...]
    waiting: ContainerEvidence | None
    # How often its container was started again, and the last line of the end before.
    restarts: int
    last_line: str
    reason: str
    message: str

    def find_condition(self, kind: str, status: str) -> ConditionEvidence | None:
        """Return the condition of a type, if it has that status."""
        return next((entry for entry in self.conditions if (entry.type, entry.status) == (kind, status)), None)


@dataclass(frozen=True, slots=True)
class ClaimEvidence:
    """A volume claim of the job."""

    name: str
    uid: str
    phase: str
    storage_class: str | None
    created_at: datetime | None
    deleted_at: datetime | None


@dataclass(frozen=True, slots=True)
class GroupEvidence:
    """The object of a gang or a queue: a PodGroup, or Kueue's Workload."""

    kind: str
    name: str
    phase: str
    is_active: bool
    checks: tuple[ConditionEvidence, ...]
    conditions: tuple[ConditionEvidence, ...]

    def find_condition(self, kind: str, status: str) -> ConditionEvidence | None:
        """Return the condition of a type, if it has that status."""
        return next((entry for entry in self.conditions if (entry.type, entry.status) == (kind, status)), None)


@dataclass(frozen=True, slots=True)
class EventEvidence:
    """An event about an object of the job."""

    uid: str
    reason: str
    message: str
    seen_at: datetime | None


@dataclass(frozen=True, slots=True)
class NodeEvidence:
    """A node: whether it is heard of, and what it offers."""

    name: str
    ready: ConditionEvidence | None
    offers: Mapping[str, int] = field(default_factory=lambda: _NO_COUNTS)


@dataclass(frozen=True, slots=True)
class Evidence:
    """Everything that is known. An empty tuple is no proof that there is none: the reader may have no right to look."""

    job: JobEvidence
    pods: tuple[PodEvidence, ...] = ()
    claims: tuple[ClaimEvidence, ...] = ()
    groups: tuple[GroupEvidence, ...] = ()
    events: tuple[EventEvidence, ...] = ()
    nodes: tuple[NodeEvidence, ...] = ()


def read_pod_evidence(raw: Raw) -> PodEvidence:
    """Read a pod."""
    about, spec = api_bodies.object_metadata(raw), api_bodies.as_mapping(raw.get("spec"))
    status = api_bodies.as_mapping(raw.get("status"))
    return PodEvidence(
        name=api_bodies.as_text(about.get("name")),
        uid=api_bodies.as_text(about.get("uid")),
        role=api_bodies.as_text(api_bodies.find_label(raw, Label.ROLE)),
        attempt=api_bodies.as_count(api_bodies.find_label(raw, Label.ATTEMPT)) or 0,
        index=api_bodies.as_count(api_bodies.find_label(raw, Label.INDEX)) or 0,
        phase=api_bodies.as_text(status.get("phase")) or "Pending",
        node=api_bodies.as_text(spec.get("nodeName")),
        scheduler=api_bodies.as_text(spec.get("schedulerName")),
        queue=api_bodies.as_text(api_bodies.find_label(raw, "kueue.x-k8s.io/queue-name")),
        created_at=api_bodies.as_time(about.get("creationTimestamp")),
        ends_by=api_bodies.as_time(about.get("deletionTimestamp")),
        conditions=_read_conditions(status),
        waiting=_read_waiting_container(status),
        restarts=api_bodies.read_restarts(status),
        last_line=_read_last_line(status),
        reason=api_bodies.as_text(status.get("reason")),
        message=_read_message(status),
    )


def read_claim_evidence(raw: Raw) -> ClaimEvidence:
    """Read a claim."""
    about, spec = api_bodies.object_metadata(raw), api_bodies.as_mapping(raw.get("spec"))
    storage_class = spec.get("storageClassName")
    return ClaimEvidence(
        name=api_bodies.as_text(about.get("name")),
        uid=api_bodies.as_text(about.get("uid")),
        phase=api_bodies.as_text(api_bodies.as_mapping(raw.get("status")).get("phase")) or "Pending",
        storage_class=storage_class if isinstance(storage_class, str) else None,
        created_at=api_bodies.as_time(about.get("creationTimestamp")),
        deleted_at=api_bodies.as_time(about.get("deletionTimestamp")),
    )


def read_group_evidence(raw: Raw) -> GroupEvidence:
    """Read a PodGroup of any scheduler, or a Workload."""
    about, status = api_bodies.object_metadata(raw), api_bodies.as_mapping(raw.get("status"))
    return GroupEvidence(
        kind=api_bodies.as_text(raw.get("kind")),
        name=api_bodies.as_text(about.get("name")),
        phase=api_bodies.as_text(status.get("phase")),
        is_active=api_bodies.as_mapping(raw.get("spec")).get("active") is not False,
        checks=tuple(
            ConditionEvidence(
                api_bodies.as_text(check.get("name")),
                api_bodies.as_text(check.get("state")),
                "",
                _read_message(check),
                api_bodies.as_time(check.get("lastTransitionTime")),
            )
            for check in api_bodies.as_mappings(status.get("admissionChecks"))
        ),
        conditions=_read_conditions(status),
    )


def read_event_evidence(raw: Raw) -> EventEvidence:
    """Read an event of either API: `note` and `regarding`, or `message` and `involvedObject`."""
    about = api_bodies.as_mapping(raw.get("regarding") or raw.get("involvedObject"))
    series = api_bodies.as_mapping(raw.get("series"))
    times = (
        series.get("lastObservedTime"),
        raw.get("lastTimestamp") or raw.get("deprecatedLastTimestamp"),
        raw.get("eventTime"),
        api_bodies.object_metadata(raw).get("creationTimestamp"),
    )
    return EventEvidence(
        uid=api_bodies.as_text(about.get("uid")),
        reason=api_bodies.as_text(raw.get("reason")),
        message=api_bodies.as_text(raw.get("note") or raw.get("message"))[:_MESSAGE_CHARACTERS],
        seen_at=next((time for time in map(api_bodies.as_time, times) if time is not None), None),
    )


def read_node_evidence(raw: Raw) -> NodeEvidence:
    """Read a node. Only whole numbers of devices count: cpu and memory have units that no rule here compares."""
    status = api_bodies.as_mapping(raw.get("status"))
    allocatable = api_bodies.as_mapping(status.get("allocatable"))
    counts = {name: api_bodies.as_count(str(value)) for name, value in allocatable.items() if "/" in str(name)}
    ready = next((entry for entry in _read_conditions(status) if entry.type == "Ready"), None)
    return NodeEvidence(
        api_bodies.as_text(api_bodies.object_metadata(raw).get("name")),
        ready,
        MappingProxyType({name: count for name, count in counts.items() if count is not None}),
    )


def sorted_pods(pods: tuple[PodEvidence, ...], attempt: int) -> tuple[PodEvidence, ...]:
    """Return trainers of an attempt, then engines, in the order of their indices."""
    present = (pod for pod in pods if pod.role == PodRole.ROLLOUT or pod.attempt == attempt)
    return tuple(sorted(present, key=lambda pod: (pod.role == PodRole.ROLLOUT, pod.index)))


def _read_conditions(status: Raw) -> tuple[ConditionEvidence, ...]:
    return tuple(
        ConditionEvidence(
            api_bodies.as_text(entry.get("type")),
            api_bodies.as_text(entry.get("status")),
            api_bodies.as_text(entry.get("reason")),
            _read_message(entry),
            api_bodies.as_time(entry.get("lastTransitionTime")),
        )
        for entry in api_bodies.as_mappings(status.get("conditions"))
    )


def _read_message(holder: Raw) -> str:
    return api_bodies.as_text(holder.get("message"))[:_MESSAGE_CHARACTERS]


def _read_last_line(status: Raw) -> str:
    containers = api_bodies.as_mappings(status.get("containerStatuses"))
    last_states = (api_bodies.as_mapping(container.get("lastState")) for container in containers)
    ends = (api_bodies.as_mapping(state.get("terminated")) for state in last_states)
    lines = (api_bodies.last_line(end.get("message"))[:_MESSAGE_CHARACTERS] for end in ends)
    return next(filter(None, lines), "")


def _read_waiting_container(status: Raw) -> ContainerEvidence | None:
    containers = (
        *api_bodies.as_mappings(status.get("initContainerStatuses")),
        *api_bodies.as_mappings(status.get("containerStatuses")),
    )
    for container in containers:
        waiting = api_bodies.as_mapping(api_bodies.as_mapping(container.get("state")).get("waiting"))
        if waiting.get("reason"):
            last_end = api_bodies.as_mapping(api_bodies.as_mapping(container.get("lastState")).get("terminated"))
            return ContainerEvidence(
                name=api_bodies.as_text(container.get("name")),
                image=api_bodies.as_text(container.get("image")),
                reason=api_bodies.as_text(waiting.get("reason")),
                message=_read_message(waiting),
                last_reason=api_bodies.as_text(last_end.get("reason")),
                last_exit_code=api_bodies.as_integer(last_end.get("exitCode")),
                last_line=api_bodies.last_line(last_end.get("message"))[:_MESSAGE_CHARACTERS],
            )
    return None
