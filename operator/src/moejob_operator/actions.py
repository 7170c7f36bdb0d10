"""Actions of a reconcile on the cluster. Planning returns these; performing carries them out; nothing else acts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

Manifest = Mapping[str, Any]


class Kind(StrEnum):
    """Kinds of objects the operator creates or deletes."""

    POD = "Pod"
    SERVICE = "Service"
    CLAIM = "PersistentVolumeClaim"
    POD_GROUP = "PodGroup"
    SECRET = "Secret"
    NETWORK_POLICY = "NetworkPolicy"
    JOB = "MoETrainingJob"


# Created and never read: RBAC cannot name Secrets of later jobs, so a right to read these would cover every Secret.
WRITE_ONLY = frozenset({Kind.SECRET, Kind.NETWORK_POLICY})


@dataclass(frozen=True, slots=True)
class ObjectReference:
    """One object, by name and UID: an object of the same name that came later is another object."""

    kind: Kind
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Ensure:
    """Create the object unless it exists. Another client's object of that name is an error, and never changed."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete exactly this object. A pod gets its own grace period unless another is set; 0 waits for no kubelet."""

    ref: ObjectReference
    grace_seconds: int | None = None

    @property
    def is_forced(self) -> bool:
        """Return whether the deletion waits for no kubelet, because the pod's node is gone."""
        return self.grace_seconds == 0


Action = Ensure | Delete


class Severity(StrEnum):
    """`type` of an event, as in Kubernetes."""

    NORMAL = "Normal"
    WARNING = "Warning"


class EventReason(StrEnum):
    """Reasons of events about a job; one that waits also gets the reason of its condition Running."""

    ACCEPTED = "Accepted"
    NOT_ACCEPTED = "NotAccepted"
    MODEL_UNCHECKED = "ModelUnchecked"
    CHECKPOINTED = "Checkpointed"
    RUNNING = "Running"
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    SUCCEEDED = "Succeeded"
    FAILED = "Failed"
    GANG_RESTARTED = "GangRestarted"
    PODS_REPLACED = "PodsReplaced"
    RANKS_RESTARTED = "RanksRestarted"
    POD_FORCE_DELETED = "PodForceDeleted"
    ROLLOUT_REPLACED = "RolloutReplaced"
    UNKNOWN_POD_DELETED = "UnknownPodDeleted"
    ROUTER_COLLAPSED = "RouterCollapsed"
    ROUTER_RECOVERED = "RouterRecovered"
    NOTHING_LEARNED = "NothingLearned"
    LEARNING_AGAIN = "LearningAgain"


@dataclass(frozen=True, slots=True)
class Event:
    """An event about the job, posted only after the status that it is about is written."""

    severity: Severity
    reason: str
    message: str
