"""Evidence from the objects of a list such as `kubectl get moetrainingjobs,pods,pvc,events -o yaml` prints."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import islice

from pydantic import ValidationError

from moejob_api import api_bodies
from moejob_api.api_bodies import Raw
from moejob_api.contract.pods import Label
from moejob_api.diagnosis.evidence import (
    Evidence,
    JobEvidence,
    read_claim_evidence,
    read_event_evidence,
    read_group_evidence,
    read_node_evidence,
    read_pod_evidence,
)
from moejob_api.job import KIND
from moejob_api.job.status import Status

_GROUP_KINDS = frozenset({"PodGroup", "Workload"})
# Each round drops at least one field that cannot be read.
_ROUNDS = 64
# No status has as many, and a list that is too long is still seen to be.
_MOST_ITEMS, _MOST_LEVELS = 1000, 32


def list_objects(document: object) -> Iterator[Raw]:
    """Yield the objects of a document: itself, or the items of a list, which leave out what the list's kind says."""
    body = api_bodies.as_mapping(document)
    kind = api_bodies.as_text(body.get("kind"))
    if not kind.endswith("List") or "items" not in body:
        yield from (body,) if body else ()
        return
    for item in api_bodies.as_mappings(body.get("items")):
        yield {"kind": kind.removesuffix("List"), **item}


def find_jobs(objects: Iterable[Raw]) -> tuple[Raw, ...]:
    """Return the jobs among objects."""
    return tuple(body for body in objects if body.get("kind") == KIND)


def read_evidence(job: Raw, objects: Iterable[Raw]) -> Evidence:
    """Read the evidence about a job from all objects of its namespace; those of other jobs are left out."""
    bodies, evidence = tuple(objects), read_job_evidence(job)
    pods = tuple(body for body in bodies if body.get("kind") == "Pod" and is_of_job(body, job))
    names = {api_bodies.object_metadata(body).get("name") for body in pods}
    claims = tuple(body for body in bodies if body.get("kind") == "PersistentVolumeClaim" and _is_claim_of(body, job))
    groups = (body for body in bodies if body.get("kind") in _GROUP_KINDS and _is_group_of(body, job, names))
    return Evidence(
        job=evidence,
        pods=tuple(map(read_pod_evidence, pods)),
        claims=tuple(map(read_claim_evidence, claims)),
        groups=tuple(map(read_group_evidence, groups)),
        events=tuple(read_event_evidence(body) for body in bodies if body.get("kind") == "Event"),
        nodes=tuple(read_node_evidence(body) for body in bodies if body.get("kind") == "Node"),
    )


def read_job_evidence(job: Raw) -> JobEvidence:
    """Read what a diagnosis needs of the job itself."""
    about, spec = api_bodies.object_metadata(job), api_bodies.as_mapping(job.get("spec"))
    finalizers = about.get("finalizers")
    return JobEvidence(
        name=api_bodies.as_text(about.get("name")),
        namespace=api_bodies.as_text(about.get("namespace")) or "default",
        created_at=api_bodies.as_time(about.get("creationTimestamp")),
        deleted_at=api_bodies.as_time(about.get("deletionTimestamp")),
        finalizers=tuple(map(api_bodies.as_text, finalizers)) if isinstance(finalizers, list) else (),
        ttl_seconds=api_bodies.as_integer(api_bodies.as_mapping(spec.get("lifecycle")).get("ttlSecondsAfterFinished")),
        status=read_status(job.get("status")),
    )


def is_of_job(body: Raw, job: Raw) -> bool:
    """Return whether an object has the labels of a job; those of an earlier job of the same name do not count."""
    about = api_bodies.object_metadata(job)
    uid = api_bodies.find_label(body, Label.JOB_UID)
    return api_bodies.find_label(body, Label.JOB) == about.get("name") and (uid is None or uid == about.get("uid"))


def _is_claim_of(body: Raw, job: Raw) -> bool:
    storage = api_bodies.as_mapping(api_bodies.as_mapping(job.get("spec")).get("storage"))
    return is_of_job(body, job) or api_bodies.object_metadata(body).get("name") == storage.get("claimName")


def _is_group_of(body: Raw, job: Raw, pod_names: set[object]) -> bool:
    """Return whether a gang or Workload is the job's: Kueue names it after the group, and lets pods own it."""
    owners = api_bodies.as_mappings(api_bodies.object_metadata(body).get("ownerReferences"))
    return is_of_job(body, job) or any(
        owner.get("kind") == "Pod" and owner.get("name") in pod_names for owner in owners
    )


def read_status(raw: object) -> Status:
    """Read a status; fields that this version cannot read count as absent."""
    text = json.dumps(_bounded_tree(api_bodies.as_mapping(raw)), default=str)
    for _ in range(_ROUNDS):
        try:
            return Status.model_validate_json(text)
        except ValidationError as error:
            tree = json.loads(text)
            problems = error.errors(include_url=False, include_context=False, include_input=False)
            _remove_values(tree, {_present_path(tree, problem["loc"]) for problem in problems})
            text = json.dumps(tree)
    return Status()


def _bounded_tree(value: object, depth: int = 0) -> object:
    """Cut what no status has: pydantic takes a second for an error in each of 100,000 items."""
    if depth > _MOST_LEVELS:
        return None
    if isinstance(value, Mapping):
        return {str(key): _bounded_tree(inner, depth + 1) for key, inner in islice(value.items(), _MOST_ITEMS)}
    if isinstance(value, list | tuple):
        return [_bounded_tree(inner, depth + 1) for inner in value[:_MOST_ITEMS]]
    return value


def _present_path(tree: object, path: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Return the path of the faulty value; where a value is missing, the path of the value that should hold it."""
    holder = tree
    for step in path[:-1]:
        holder = _value_at(holder, step)
    return path if _has_value(holder, path[-1]) else path[:-1]


def _remove_values(tree: object, paths: set[tuple[int | str, ...]]) -> None:
    # Backwards: the removal of an item moves those behind it.
    for *above, last in sorted(filter(None, paths), key=_sort_key, reverse=True):
        holder = tree
        for step in above:
            holder = _value_at(holder, step)
        if _has_value(holder, last):
            del holder[last]  # type: ignore[attr-defined]


def _sort_key(path: tuple[int | str, ...]) -> list[tuple[int, str]]:
    return [(step, "") if isinstance(step, int) else (0, step) for step in path]


def _value_at(holder: object, step: int | str) -> object:
    if isinstance(holder, dict):
        return holder.get(step)
    if isinstance(holder, list) and isinstance(step, int) and step < len(holder):
        return holder[step]
    return None


def _has_value(holder: object, step: int | str) -> bool:
    if isinstance(holder, list):
        return isinstance(step, int) and step < len(holder)
    return isinstance(holder, dict) and step in holder
