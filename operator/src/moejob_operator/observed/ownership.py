"""Ownership of objects: the job that an object belongs to, and the place of a pod in it.

Everyone who may create objects in a namespace can write any label and any owner reference. So an object is a job's only
when all of them agree: its controller is this very job, its labels name it too, and a pod's name is what role, attempt
and index in its labels make of it. So no two objects stand for one place in a gang: names are unique.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from moejob_api import api_bodies
from moejob_api.contract.pods import Label, PodRole, pod_name
from moejob_api.job import GROUP, KIND
from moejob_operator.cluster import Raw


@dataclass(frozen=True, slots=True)
class ControllingJob:
    """The job that controls an object, by its name and UID."""

    name: str
    uid: str


@dataclass(frozen=True, slots=True)
class PodPlace:
    """The place of a pod in its job, as its name says."""

    role: PodRole
    attempt: int
    index: int


def find_controller(raw: Raw) -> ControllingJob | None:
    """Return the job that owner reference and labels of an object agree on; None when they do not."""
    owners = api_bodies.as_mappings(api_bodies.object_metadata(raw).get("ownerReferences"))
    referenced_job = next(
        (_controller_of(owner) for owner in owners if owner.get("controller") is True and _is_job(owner)), None
    )
    return referenced_job if referenced_job is not None and _labelled_job(raw) == referenced_job else None


def pod_place(raw: Raw, job: ControllingJob) -> PodPlace | None:
    """Return the place of a pod in this job; None for another job's pod, or when name and labels differ."""
    labelled_place = _labelled_place(raw)
    if labelled_place is None or find_controller(raw) != job:
        return None
    is_named_so = api_bodies.object_metadata(raw).get("name") == pod_name(
        job.name, labelled_place.role, labelled_place.attempt, labelled_place.index
    )
    return labelled_place if is_named_so else None


def is_pod_of_earlier(raw: Raw, job: ControllingJob) -> bool:
    """Return whether a pod is one of another job of the same name."""
    controlling_job = find_controller(raw)
    return (
        controlling_job is not None
        and controlling_job.name == job.name
        and controlling_job != job
        and pod_place(raw, controlling_job) is not None
    )


def is_as_made(raw: Raw, manifest: Mapping[str, Any]) -> bool:
    """Return whether an existing object looks as if it was created from this manifest."""
    expected = find_controller(manifest)
    return (
        expected is not None and find_controller(raw) == expected and _labelled_place(raw) == _labelled_place(manifest)
    )


def _controller_of(owner: Raw) -> ControllingJob:
    return ControllingJob(api_bodies.as_text(owner.get("name")), api_bodies.as_text(owner.get("uid")))


def _is_job(owner: Raw) -> bool:
    # Any version of the API: an object outlives the version that created it.
    return owner.get("kind") == KIND and api_bodies.as_text(owner.get("apiVersion")).partition("/")[0] == GROUP


def _labelled_job(raw: Raw) -> ControllingJob:
    return ControllingJob(
        api_bodies.as_text(api_bodies.find_label(raw, Label.JOB)),
        api_bodies.as_text(api_bodies.find_label(raw, Label.JOB_UID)),
    )


def _labelled_place(raw: Raw) -> PodPlace | None:
    role = api_bodies.find_label(raw, Label.ROLE)
    attempt, index = (api_bodies.as_count(api_bodies.find_label(raw, key)) for key in (Label.ATTEMPT, Label.INDEX))
    if role not in list(PodRole) or attempt is None or index is None:
        return None
    return PodPlace(PodRole(role), attempt, index)
