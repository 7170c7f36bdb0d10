"""Ownership of objects: the job that an object belongs to, and the place of a pod in it.

Everyone who may create objects in a namespace can write any label and any owner reference. So an object is a job's only
when all of them agree: its controller is this very job, its labels name it too, and a pod's name is what role, attempt
and index in its labels make of it. So no two objects stand for one place in a gang: names are unique.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moejob_api.contract.pods import Label, Role, pod_name
from moejob_api.job import GROUP, KIND
from moejob_operator.cluster import Raw
from moejob_operator.observed import reading


@dataclass(frozen=True, slots=True)
class Controller:
    """The job that controls an object, by its name and UID."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class PodPlace:
    """The place of a pod in its job, of which its name is made."""

    role: Role
    attempt: int
    index: int


def controller(raw: Raw) -> Controller | None:
    """Return the job that owner reference and labels of an object agree on; None when they do not."""
    owners = reading.mappings(reading.metadata(raw).get("ownerReferences"))
    found = next((_of(owner) for owner in owners if owner.get("controller") is True and _is_job(owner)), None)
    return found if found is not None and _labelled(raw) == found else None


def place(raw: Raw, job: Controller) -> PodPlace | None:
    """Return the place of a pod in this job; None for another job's pod, or when name and labels differ."""
    found = _labelled_place(raw)
    if found is None or controller(raw) != job:
        return None
    is_named_so = reading.metadata(raw).get("name") == pod_name(job.name, found.role, found.attempt, found.index)
    return found if is_named_so else None


def is_pod_of_earlier(raw: Raw, job: Controller) -> bool:
    """Return whether a pod is one of another job of the same name."""
    other = controller(raw)
    return other is not None and other.name == job.name and other != job and place(raw, other) is not None


def is_as_made(raw: Raw, manifest: Mapping[str, Any]) -> bool:
    """Return whether an existing object looks as if it was created from this manifest."""
    expected = controller(manifest)
    return expected is not None and controller(raw) == expected and _labelled_place(raw) == _labelled_place(manifest)


def _of(owner: Raw) -> Controller:
    return Controller(reading.text(owner.get("name")), reading.text(owner.get("uid")))


def _is_job(owner: Raw) -> bool:
    # Any version of the API: an object outlives the version that created it.
    return owner.get("kind") == KIND and reading.text(owner.get("apiVersion")).partition("/")[0] == GROUP


def _labelled(raw: Raw) -> Controller:
    return Controller(reading.text(reading.label(raw, Label.JOB)), reading.text(reading.label(raw, Label.JOB_UID)))


def _labelled_place(raw: Raw) -> PodPlace | None:
    role = reading.label(raw, Label.ROLE)
    attempt, index = (reading.count(reading.label(raw, key)) for key in (Label.ATTEMPT, Label.INDEX))
    if role not in list(Role) or attempt is None or index is None:
        return None
    return PodPlace(Role(role), attempt, index)
