"""The job's own API body: its identity, its spec, and its last status."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from datetime import datetime
from weakref import WeakValueDictionary

import orjson

from moejob_api import api_bodies
from moejob_api.diagnosis.reading import read_status
from moejob_api.documents import parse_job
from moejob_api.documents.known_fields import known_fields
from moejob_api.job import Spec
from moejob_api.job.base import ApiModel
from moejob_api.job.fields import job_fields
from moejob_api.job.status import AppliedProfile, Phase, Status
from moejob_api.problems import InvalidSpec, Problem, Rule
from moejob_api.profiles.merging import with_values
from moejob_api.profiles.reading import TrainingProfile, apply_profile
from moejob_operator.cluster import JobKey, Raw
from moejob_operator.expiring_cache import ExpiringCache

# The spec of a job, or the problems for which it cannot be read.
ParsedSpec = tuple[Spec | None, tuple[Problem, ...]]


@dataclass(frozen=True, slots=True)
class Job:
    """One job as it was read. `spec` is None exactly when `problems` say why."""

    name: str
    namespace: str
    uid: str
    generation: int
    created_at: datetime | None
    is_being_deleted: bool
    spec: Spec | None
    problems: tuple[Problem, ...]
    status: Status
    # What the spec has from its profile; None without one, or while there is none of that name.
    profile: AppliedProfile | None = None
    missing_profile: str | None = None

    @property
    def key(self) -> JobKey:
        """Return the key of a job in the work queue."""
        return JobKey(self.namespace, self.name)

    @property
    def identity(self) -> Hashable:
        """Return the identity by which a validation of its spec may be remembered."""
        return self.uid, self.generation, _profile_identity(self.profile)

    @property
    def is_profile_recorded(self) -> bool:
        """Return whether the status holds what the spec has from a profile: what follows from it may be created."""
        return self.profile is None or self.status.profile is not None


class SpecCache:
    """A cache of parsed specs, one for each job and generation: every reconcile reads the spec."""

    def __init__(self, parsed_specs: ExpiringCache[ParsedSpec] | None = None) -> None:
        self._parsed_specs: ExpiringCache[ParsedSpec] = ExpiringCache() if parsed_specs is None else parsed_specs
        # By the section's name and its JSON. A section goes with the last job that holds it.
        self._sections: WeakValueDictionary[tuple[str, bytes], ApiModel] = WeakValueDictionary()

    def read_spec(self, raw: Raw, profile: AppliedProfile | None = None) -> ParsedSpec:
        """Return the spec of a job, merged with its profile, or the reason that it cannot be read."""
        about = api_bodies.object_metadata(raw)
        key = JobKey(api_bodies.as_text(about.get("namespace")), api_bodies.as_text(about.get("name")))
        identity = (api_bodies.as_text(about.get("uid")), _read_generation(about), _profile_identity(profile))
        cached = self._parsed_specs.get(key, identity)
        if cached is not None:
            return cached
        if profile is not None:
            raw = {**raw, "spec": with_values(api_bodies.as_mapping(raw.get("spec")), profile.values)}
        return self._parsed_specs.store(key, identity, self._share_sections(raw, _parse_spec(raw)))

    def _share_sections(self, raw: Raw, parsed: ParsedSpec) -> ParsedSpec:
        """Share equal sections between jobs, which saves memory: most sections hold defaults."""
        spec, problems = parsed
        if spec is None:
            return parsed
        spec_fields = api_bodies.as_mapping(raw.get("spec"))
        sections = {name: section for name, section in spec if name in spec_fields and isinstance(section, ApiModel)}
        shared_sections = {
            name: self._sections.setdefault((name, orjson.dumps(spec_fields[name])), sections[name])
            for name in sections
        }
        return spec.model_copy(
            update={name: shared for name, shared in shared_sections.items() if shared == sections[name]}
        ), problems

    def forget(self, key: JobKey) -> None:
        """Drop the spec of a job that is gone; sections stay while other jobs hold them."""
        self._parsed_specs.forget(key)


def named_profile(raw: Raw) -> str | None:
    """The profile that a job names."""
    return api_bodies.as_text(api_bodies.as_mapping(raw.get("spec")).get("profile")) or None


def needs_profile(raw: Raw) -> bool:
    """Return whether the profile of a job has to be found: a job that was accepted has what it took from it."""
    status = api_bodies.as_mapping(raw.get("status"))
    is_finished = status.get("phase") in (Phase.SUCCEEDED, Phase.FAILED)
    return named_profile(raw) is not None and status.get("profile") is None and not is_finished


def read_job(raw: Raw, specs: SpecCache, profile: TrainingProfile | None = None) -> Job:
    """Read a job. An invalid body, which the webhook has not seen, has problems and raises nothing.

    `profile` is the one that a job names which has taken none yet.
    """
    about = api_bodies.object_metadata(raw)
    status = read_status(raw.get("status"))
    applied = status.profile
    if applied is None and profile is not None:
        applied = apply_profile(api_bodies.as_mapping(raw.get("spec")), profile)
    spec, problems = specs.read_spec(raw, applied)
    return Job(
        name=api_bodies.as_text(about.get("name")),
        namespace=api_bodies.as_text(about.get("namespace")),
        uid=api_bodies.as_text(about.get("uid")),
        generation=_read_generation(about),
        created_at=api_bodies.as_time(about.get("creationTimestamp")),
        is_being_deleted=about.get("deletionTimestamp") is not None,
        spec=spec,
        problems=problems,
        status=status,
        profile=applied,
        missing_profile=named_profile(raw) if applied is None and needs_profile(raw) else None,
    )


def _profile_identity(profile: AppliedProfile | None) -> Hashable:
    """A profile of the same UID and generation gives the same job the same values."""
    return None if profile is None else (profile.uid, profile.generation)


def _read_generation(about: Raw) -> int:
    return max(0, api_bodies.as_integer(about.get("generation")) or 0)


def _parse_spec(raw: Raw) -> ParsedSpec:
    body = {name: value for name, value in raw.items() if name != "status"}
    try:
        return parse_job(body).spec, ()
    except InvalidSpec as refusal:
        return _parse_known_fields(body), refusal.problems or (Problem(Rule.FIELD, "", "cannot be read"),)


def _parse_known_fields(body: Raw) -> Spec | None:
    """Return the spec without fields of a later definition, which fills its defaults into jobs that run already."""
    spec = body.get("spec")
    readable_spec = known_fields(spec, job_fields().fields["spec"])
    if readable_spec == spec:
        return None
    try:
        return parse_job({**body, "spec": readable_spec}).spec
    except InvalidSpec:
        return None
