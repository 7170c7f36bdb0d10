"""The facts on which a reconcile decides: API bodies, parsed at the edge into facts. Decides nothing, never raises.

An unreadable body becomes a fact, too: an unreadable termination message counts as absent, a job whose spec does not
parse has problems.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from moejob_api.contract.pods import PodProgress
from moejob_operator.cluster import Children, JobKey, Raw
from moejob_operator.expiring_cache import ExpiringCache
from moejob_operator.observed import reading
from moejob_operator.observed.jobs import Job, Specs, job
from moejob_operator.observed.ownership import Controller, controller, is_as_made, is_pod_of_earlier, place
from moejob_operator.observed.pods import TAKEN_BY_TAINT, Ended, Pod, PodPhase, Waiting, is_unheard, pod, taken_by_taint

__all__ = [
    "TAKEN_BY_TAINT",
    "Ended",
    "Job",
    "Observed",
    "Pod",
    "PodPhase",
    "PodReadings",
    "Specs",
    "VolumeClaim",
    "VolumeClaimPhase",
    "Waiting",
    "is_as_made",
    "is_unheard",
    "observed",
    "taken_by_taint",
    "with_progress",
]

_SILENCE: Mapping[str, PodProgress] = MappingProxyType({})


class VolumeClaimPhase(StrEnum):
    """As in Kubernetes."""

    PENDING = "Pending"
    BOUND = "Bound"
    LOST = "Lost"


@dataclass(frozen=True, slots=True)
class VolumeClaim:
    """A volume claim of the job."""

    name: str
    phase: VolumeClaimPhase


@dataclass(frozen=True, slots=True)
class Observed:
    """The job and everything that belongs to it.

    Objects that only look like the job's are left out.

    - `earlier_pods` belong to a deleted job of the same name.
    - `was_polled`: every trainer pod was asked for its progress; `progress` has the replies, by pod UID.
    - `has_access`: this process has created the job's Secret and policy, which are never read, for this attempt.
    - `lacks_secret`: the Secret is known to be missing.
    """

    job: Job
    pods: tuple[Pod, ...]
    earlier_pods: tuple[str, ...]
    services: frozenset[str]
    claims: tuple[VolumeClaim, ...]
    pod_groups: frozenset[str]
    lost_nodes: frozenset[str]
    was_polled: bool = False
    has_access: bool = False
    lacks_secret: bool = False
    progress: Mapping[str, PodProgress] = field(default_factory=lambda: _SILENCE)

    @property
    def holds_secret(self) -> bool:
        """Return whether pods run, and so know a value of the Secret."""
        return any(pod.phase is PodPhase.RUNNING for pod in self.pods)


class PodReadings:
    """A cache of the facts in pod bodies: most bodies have not changed since the last reconcile.

    Nothing changes a body in place: a newer version is another object.
    """

    def __init__(self) -> None:
        self._known: ExpiringCache[Mapping[int, PodReading]] = ExpiringCache()

    def of(self, bodies: tuple[Raw, ...], about: Job) -> tuple[PodReading, ...]:
        """Return the readings of bodies as a job sees them."""
        owner = Controller(about.name, about.uid)
        known = self._known.of(about.key, about.uid) or {}
        found = tuple(known.get(id(body)) or _reading(body, owner) for body in bodies)
        # A cached reading keeps its body alive, so no other object can have the same id.
        self._known.keep(about.key, about.uid, {id(reading.body): reading for reading in found})
        return found

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        self._known.forget(key)


@dataclass(frozen=True, slots=True)
class PodReading:
    """The facts in the body of a pod, and its owner: the job, an earlier job of this name, or neither."""

    body: Raw
    pod: Pod | None
    is_of_earlier: bool


def observed(raw: Raw, children: Children, specs: Specs, readings: PodReadings | None = None) -> Observed:
    """Read the job and its objects from API bodies."""
    about = job(raw, specs)
    owner = Controller(about.name, about.uid)
    read = (readings or PodReadings()).of(children.pods, about)
    return Observed(
        job=about,
        pods=tuple(sorted((found.pod for found in read if found.pod is not None), key=lambda found: found.name)),
        earlier_pods=tuple(sorted(_name(found.body) for found in read if found.is_of_earlier)),
        services=frozenset(_name(body) for body in _ours(children.services, owner)),
        claims=tuple(_claim(body) for body in _ours(children.claims, owner)),
        pod_groups=frozenset(_name(body) for body in _ours(children.pod_groups, owner)),
        lost_nodes=children.lost_nodes,
    )


def with_progress(seen: Observed, answers: Mapping[str, PodProgress]) -> Observed:
    """Add the progress that pods have reported. The reply of another job's pod does not count."""
    by_uid = {found.uid: found for found in seen.pods}
    # Addresses soon belong to other pods: the reply may come from another gang.
    heard = {
        uid: answer
        for uid, answer in answers.items()
        if uid in by_uid and (answer.attempt, answer.index) == (by_uid[uid].attempt, by_uid[uid].index)
    }
    return replace(seen, was_polled=True, progress=MappingProxyType(heard))


def _reading(body: Raw, owner: Controller) -> PodReading:
    found = place(body, owner)
    return PodReading(body, None if found is None else pod(body, found), is_pod_of_earlier(body, owner))


def _ours(bodies: tuple[Raw, ...], owner: Controller) -> Iterator[Raw]:
    return (body for body in bodies if controller(body) == owner)


def _name(body: Raw) -> str:
    return reading.text(reading.metadata(body).get("name"))


def _claim(body: Raw) -> VolumeClaim:
    phase = reading.text(reading.mapping(body.get("status")).get("phase"))
    return VolumeClaim(
        _name(body), VolumeClaimPhase(phase) if phase in list(VolumeClaimPhase) else VolumeClaimPhase.PENDING
    )
