"""The job's own API body: its identity, its spec, and its last status."""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from weakref import WeakValueDictionary

import orjson
from pydantic import ValidationError

from moejob_api.documents import parse_job
from moejob_api.job import Spec
from moejob_api.job.base import ApiModel
from moejob_api.job.status import Status
from moejob_api.problems import InvalidSpec, Problem, Rule
from moejob_operator.cluster import JobKey, Raw
from moejob_operator.expiring_cache import ExpiringCache
from moejob_operator.observed import reading

# The spec of a job, or the problems for which it cannot be read.
Asked = tuple[Spec | None, tuple[Problem, ...]]

# Each round drops at least one field that cannot be read.
_ROUNDS = 64


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


class Specs:
    """A cache of parsed specs, one for each job and generation: every reconcile reads the spec."""

    def __init__(self, known: ExpiringCache[Asked] | None = None) -> None:
        self._known: ExpiringCache[Asked] = ExpiringCache() if known is None else known
        # By the section's name and its JSON. A section goes with the last job that holds it.
        self._sections: WeakValueDictionary[tuple[str, bytes], ApiModel] = WeakValueDictionary()

    def asked(self, raw: Raw) -> Asked:
        """Return the spec of a job, or the reason that it cannot be read."""
        about = reading.metadata(raw)
        key = JobKey(reading.text(about.get("namespace")), reading.text(about.get("name")))
        identity = (reading.text(about.get("uid")), _generation(about))
        known = self._known.of(key, identity)
        return self._known.keep(key, identity, self._thrifty(raw, _asked(raw))) if known is None else known

    def _thrifty(self, raw: Raw, asked: Asked) -> Asked:
        """Share equal sections between jobs, which saves memory: most sections hold defaults."""
        spec, problems = asked
        if spec is None:
            return asked
        given = reading.mapping(raw.get("spec"))
        own = {name: section for name, section in spec if name in given and isinstance(section, ApiModel)}
        known = {name: self._sections.setdefault((name, orjson.dumps(given[name])), own[name]) for name in own}
        return spec.model_copy(update={name: one for name, one in known.items() if one == own[name]}), problems

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        self._known.forget(key)


def job(raw: Raw, specs: Specs) -> Job:
    """Read a job. An invalid body, which the webhook has not seen, has problems and raises nothing."""
    about = reading.metadata(raw)
    spec, problems = specs.asked(raw)
    return Job(
        name=reading.text(about.get("name")),
        namespace=reading.text(about.get("namespace")),
        uid=reading.text(about.get("uid")),
        generation=_generation(about),
        created_at=reading.time(about.get("creationTimestamp")),
        is_being_deleted=about.get("deletionTimestamp") is not None,
        spec=spec,
        problems=problems,
        status=status(raw.get("status")),
    )


def status(raw: object) -> Status:
    """Read the last status; fields that this version cannot read count as absent."""
    text = json.dumps(reading.mapping(raw), default=str)
    for _ in range(_ROUNDS):
        try:
            return Status.model_validate_json(text)
        except ValidationError as error:
            tree = json.loads(text)
            for found in error.errors(include_url=False, include_context=False, include_input=False):
                _drop(tree, found["loc"])
            text = json.dumps(tree)
    return Status()


def _generation(about: Raw) -> int:
    return max(0, reading.whole(about.get("generation")) or 0)


def _asked(raw: Raw) -> Asked:
    body = {name: value for name, value in raw.items() if name != "status"}
    try:
        return parse_job(body).spec, ()
    except InvalidSpec as refused:
        return None, refused.problems or (Problem(Rule.FIELD, "", "cannot be read"),)


def _drop(tree: object, place: tuple[int | str, ...]) -> None:
    """Remove the value at a path; where there is none, remove the value that should hold it."""
    *above, last = place
    holder, outer = tree, None
    for step in above:
        outer = (holder, step)
        holder = _inside(holder, step)
    if not _removed(holder, last) and outer is not None:
        _removed(*outer)


def _inside(holder: object, step: int | str) -> object:
    if isinstance(holder, dict):
        return holder.get(step)
    if isinstance(holder, list) and isinstance(step, int) and step < len(holder):
        return holder[step]
    return None


def _removed(holder: object, step: int | str) -> bool:
    if isinstance(holder, dict) and step in holder:
        del holder[step]
        return True
    if isinstance(holder, list) and isinstance(step, int) and step < len(holder):
        del holder[step]
        return True
    return False
