"""The facts on which a reconcile decides: API bodies, parsed at the edge into facts. Decides nothing, never raises.

An unreadable body becomes a fact, too: an unreadable termination message counts as absent, a job whose spec does not
parse has problems.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from moejob_api import api_bodies
from moejob_api.contract.pods import PodProgress
from moejob_api.diagnosis.evidence import ClaimEvidence, PodEvidence, read_claim_evidence, read_pod_evidence
from moejob_api.profiles.reading import TrainingProfile
from moejob_operator.cluster import Children, JobKey, Raw
from moejob_operator.expiring_cache import ExpiringCache
from moejob_operator.observed.jobs import Job, SpecCache, named_profile, needs_profile, read_job
from moejob_operator.observed.ownership import ControllingJob, find_controller, is_as_made, is_pod_of_earlier, pod_place
from moejob_operator.observed.pods import (
    TAKEN_BY_TAINT,
    ContainerEnd,
    ContainerWait,
    Pod,
    PodPhase,
    is_taken_by_taint,
    is_unheard,
    read_pod,
)

__all__ = [
    "TAKEN_BY_TAINT",
    "ContainerEnd",
    "ContainerWait",
    "Job",
    "Observation",
    "Pod",
    "PodPhase",
    "PodReadings",
    "SpecCache",
    "VolumeClaim",
    "VolumeClaimPhase",
    "is_as_made",
    "is_taken_by_taint",
    "is_unheard",
    "named_profile",
    "needs_profile",
    "read_observation",
    "with_progress",
]

_SILENCE: Mapping[str, PodProgress] = MappingProxyType({})


class VolumeClaimPhase(StrEnum):
    """`status.phase` of a PersistentVolumeClaim, as in Kubernetes."""

    PENDING = "Pending"
    BOUND = "Bound"
    LOST = "Lost"


@dataclass(frozen=True, slots=True)
class VolumeClaim:
    """A volume claim of the job."""

    name: str
    phase: VolumeClaimPhase


@dataclass(frozen=True, slots=True)
class Observation:
    """The job and everything that belongs to it.

    Objects that only look like the job's are left out.

    - `earlier_pods` belong to a deleted job of the same name.
    - `was_polled`: every trainer pod was asked for its progress; `progress` has the replies, by pod UID.
    - `has_access`: this process has created the job's Secret and policy, which are never read, for this attempt.
    - `lacks_secret`: the Secret is known to be missing.
    - `pod_evidence` and `claim_evidence`: the same objects, as a diagnosis reads them.
    """

    job: Job
    pods: tuple[Pod, ...]
    earlier_pods: tuple[str, ...]
    services: frozenset[str]
    claims: tuple[VolumeClaim, ...]
    pod_groups: frozenset[str]
    lost_nodes: frozenset[str]
    pod_evidence: tuple[PodEvidence, ...] = ()
    claim_evidence: tuple[ClaimEvidence, ...] = ()
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
        self._readings: ExpiringCache[Mapping[int, PodReading]] = ExpiringCache()

    def read_bodies(self, bodies: tuple[Raw, ...], about: Job) -> tuple[PodReading, ...]:
        """Return the readings of bodies as a job sees them."""
        owner = ControllingJob(about.name, about.uid)
        cached = self._readings.get(about.key, about.uid) or {}
        readings = tuple(cached.get(id(body)) or _read_pod_body(body, owner) for body in bodies)
        # A cached reading keeps its body alive, so no other object can have the same id.
        self._readings.store(about.key, about.uid, {id(reading.body): reading for reading in readings})
        return readings

    def forget(self, key: JobKey) -> None:
        """Drop the readings of a job that is gone, and with them the bodies of its pods."""
        self._readings.forget(key)


@dataclass(frozen=True, slots=True)
class PodReading:
    """The facts in the body of a pod, and its owner: the job, an earlier job of this name, or neither."""

    body: Raw
    pod: Pod | None
    is_of_earlier: bool
    evidence: PodEvidence | None


def read_observation(
    raw: Raw,
    children: Children,
    specs: SpecCache,
    readings: PodReadings | None = None,
    profile: TrainingProfile | None = None,
) -> Observation:
    """Read the job and its objects from API bodies."""
    about = read_job(raw, specs, profile)
    owner = ControllingJob(about.name, about.uid)
    pod_readings = (readings or PodReadings()).read_bodies(children.pods, about)
    return Observation(
        job=about,
        pods=tuple(sorted((entry.pod for entry in pod_readings if entry.pod is not None), key=lambda pod: pod.name)),
        earlier_pods=tuple(sorted(_object_name(reading.body) for reading in pod_readings if reading.is_of_earlier)),
        services=frozenset(_object_name(body) for body in _owned_bodies(children.services, owner)),
        claims=tuple(_read_claim(body) for body in _owned_bodies(children.claims, owner)),
        pod_groups=frozenset(_object_name(body) for body in _owned_bodies(children.pod_groups, owner)),
        lost_nodes=children.lost_nodes,
        pod_evidence=tuple(entry.evidence for entry in pod_readings if entry.evidence is not None),
        claim_evidence=tuple(read_claim_evidence(body) for body in _owned_bodies(children.claims, owner)),
    )


def with_progress(observation: Observation, replies: Mapping[str, PodProgress]) -> Observation:
    """Add the progress that pods have reported. The reply of another job's pod does not count."""
    by_uid = {known_pod.uid: known_pod for known_pod in observation.pods}
    # Addresses soon belong to other pods: the reply may come from another gang.
    matching_replies = {
        uid: reply
        for uid, reply in replies.items()
        if uid in by_uid and (reply.attempt, reply.index) == (by_uid[uid].attempt, by_uid[uid].index)
    }
    return replace(observation, was_polled=True, progress=MappingProxyType(matching_replies))


def _read_pod_body(body: Raw, owner: ControllingJob) -> PodReading:
    place_in_job = pod_place(body, owner)
    if place_in_job is None:
        return PodReading(body, None, is_pod_of_earlier(body, owner), None)
    return PodReading(body, read_pod(body, place_in_job), is_pod_of_earlier(body, owner), read_pod_evidence(body))


def _owned_bodies(bodies: tuple[Raw, ...], owner: ControllingJob) -> Iterator[Raw]:
    return (body for body in bodies if find_controller(body) == owner)


def _object_name(body: Raw) -> str:
    return api_bodies.as_text(api_bodies.object_metadata(body).get("name"))


def _read_claim(body: Raw) -> VolumeClaim:
    phase = api_bodies.as_text(api_bodies.as_mapping(body.get("status")).get("phase"))
    return VolumeClaim(
        _object_name(body), VolumeClaimPhase(phase) if phase in list(VolumeClaimPhase) else VolumeClaimPhase.PENDING
    )
