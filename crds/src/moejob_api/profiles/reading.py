"""Profiles from files and API bodies, and the job that a job and its profile make together.

A profile is read loosely: the API server has checked its fields by the same schema as a job's, and the merged job goes
through every check of a job. Only a field that no profile has is refused here, for a file has met no API server.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moejob_api.api_bodies import as_integer, as_mapping, as_text, object_metadata
from moejob_api.documents.reading import parse_job, read_file_tree
from moejob_api.documents.values import plain_fields
from moejob_api.job import API_VERSIONS, MoETrainingJob
from moejob_api.job.status import AppliedProfile
from moejob_api.problems import InvalidSpec, Problem, Rule
from moejob_api.profiles.fields import PROFILED_FIELDS, ProfileKind
from moejob_api.profiles.merging import profile_values, with_values


@dataclass(frozen=True, slots=True)
class TrainingProfile:
    """One profile as it was read; `uid` and `generation` are of the cluster's, and empty in a file."""

    kind: ProfileKind
    name: str
    spec: Mapping[str, Any]
    uid: str = ""
    generation: int = 0


@dataclass(frozen=True, slots=True)
class MergedJob:
    """A job with the values of its profile, and these by themselves."""

    job: MoETrainingJob
    profile: AppliedProfile


def read_profile_body(body: Mapping[str, Any], kind: ProfileKind) -> TrainingProfile:
    """Return the profile in a body of the API, which does not always name its kind."""
    about = object_metadata(body)
    return TrainingProfile(
        kind=kind,
        name=as_text(about.get("name")),
        spec=as_mapping(body.get("spec")),
        uid=as_text(about.get("uid")),
        generation=max(0, as_integer(about.get("generation")) or 0),
    )


def read_profile_file(path: str | Path) -> TrainingProfile:
    """Return the profile in a YAML or JSON file; raise InvalidSpec with each thing that makes it none."""
    tree = plain_fields(read_file_tree(path, kind=ProfileKind.NAMESPACED))
    problems = tuple(_file_problems(tree))
    if problems:
        raise InvalidSpec(tuple(Problem(Rule.PROFILE, "", f"{path}: {problem}") for problem in problems))
    return read_profile_body(tree, ProfileKind(str(tree["kind"])))


def apply_profile(spec: Mapping[str, Any], profile: TrainingProfile) -> AppliedProfile:
    """Return what a job has from a profile."""
    return AppliedProfile(
        kind=profile.kind,
        name=profile.name,
        uid=profile.uid,
        generation=profile.generation,
        values=profile_values(spec, profile.spec),
    )


def merge_job_file(path: str | Path, profile: TrainingProfile, settings: tuple[str, ...] = ()) -> MergedJob:
    """Return the job in a file, with settings made in it, merged with a profile that it may name."""
    tree = plain_fields(read_file_tree(path, settings))
    spec = as_mapping(tree.get("spec"))
    named = spec.get("profile")
    if named not in (None, profile.name):
        message = f"the job names the profile {named}, and the file holds {profile.name}; give the file of {named}"
        raise InvalidSpec((Problem(Rule.PROFILE, "spec.profile", message),))
    applied = apply_profile(spec, profile)
    return MergedJob(parse_job({**tree, "spec": with_values(spec, applied.values)}), applied)


def _file_problems(tree: Mapping[str, Any]) -> Iterator[str]:
    if tree.get("kind") not in list(ProfileKind) or tree.get("apiVersion") not in API_VERSIONS:
        yield f"is no profile; write apiVersion: {API_VERSIONS[0]} and kind: {' or '.join(ProfileKind)}"
        return
    if not as_text(object_metadata(tree).get("name")):
        yield "metadata.name is missing; jobs name the profile by it"
    for section, fields in as_mapping(tree.get("spec")).items():
        profiled_names = PROFILED_FIELDS.get(section)
        if profiled_names is None:
            yield f"spec.{section} is no section of a profile; it has {', '.join(PROFILED_FIELDS)}"
            continue
        for name in as_mapping(fields):
            if name not in profiled_names:
                yield f"spec.{section}.{name} is no field of a profile; write it into the job"
