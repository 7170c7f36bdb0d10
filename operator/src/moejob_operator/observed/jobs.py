"""The job's own API body: its identity, its spec, and its last status."""

from __future__ import annotations

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
from moejob_api.job.status import Status
from moejob_api.problems import InvalidSpec, Problem, Rule
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

    @property
    def key(self) -> JobKey:
        """Return the key of a job in the work queue."""
        return JobKey(self.namespace, self.name)

    @property
    def identity(self) -> tuple[str, int]:
        """Return the identity by which a validation of its spec may be remembered."""
        return self.uid, self.generation


class SpecCache:
    """A cache of parsed specs, one for each job and generation: every reconcile reads the spec."""

    def __init__(self, parsed_specs: ExpiringCache[ParsedSpec] | None = None) -> None:
        self._parsed_specs: ExpiringCache[ParsedSpec] = ExpiringCache() if parsed_specs is None else parsed_specs
        # By the section's name and its JSON. A section goes with the last job that holds it.
        self._sections: WeakValueDictionary[tuple[str, bytes], ApiModel] = WeakValueDictionary()

    def read_spec(self, raw: Raw) -> ParsedSpec:
        """Return the spec of a job, or the reason that it cannot be read."""
        about = api_bodies.object_metadata(raw)
        key = JobKey(api_bodies.as_text(about.get("namespace")), api_bodies.as_text(about.get("name")))
        identity = (api_bodies.as_text(about.get("uid")), _read_generation(about))
        cached = self._parsed_specs.get(key, identity)
        return (
            self._parsed_specs.store(key, identity, self._share_sections(raw, _parse_spec(raw)))
            if cached is None
            else cached
        )

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


def read_job(raw: Raw, specs: SpecCache) -> Job:
    """Read a job. An invalid body, which the webhook has not seen, has problems and raises nothing."""
    about = api_bodies.object_metadata(raw)
    spec, problems = specs.read_spec(raw)
    return Job(
        name=api_bodies.as_text(about.get("name")),
        namespace=api_bodies.as_text(about.get("namespace")),
        uid=api_bodies.as_text(about.get("uid")),
        generation=_read_generation(about),
        created_at=api_bodies.as_time(about.get("creationTimestamp")),
        is_being_deleted=about.get("deletionTimestamp") is not None,
        spec=spec,
        problems=problems,
        status=read_status(raw.get("status")),
    )


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
