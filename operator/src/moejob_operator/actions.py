"""What a reconcile may do to the cluster. Planning returns these; performing carries them out; nothing else acts."""

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
    JOB = "MoETrainingJob"


@dataclass(frozen=True, slots=True)
class Ref:
    """One object, by name and UID: an object of the same name that came later is another object."""

    kind: Kind
    namespace: str
    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class Ensure:
    """Create the object unless it is there. One of the same name that is not ours is an error, not ours to change."""

    manifest: Manifest


@dataclass(frozen=True, slots=True)
class Delete:
    """Delete exactly this object. A pod gets its own grace unless told otherwise; with 0 no kubelet is asked."""

    ref: Ref
    grace_seconds: int | None = None

    @property
    def is_forced(self) -> bool:
        """Whether its kubelet, with the node that is gone, will never confirm it."""
        return self.grace_seconds == 0


Action = Ensure | Delete


class Severity(StrEnum):
    """As in Kubernetes."""

    NORMAL = "Normal"
    WARNING = "Warning"


@dataclass(frozen=True, slots=True)
class Notice:
    """An event about the job, posted only after the status that it tells of is written."""

    severity: Severity
    reason: str
    message: str
