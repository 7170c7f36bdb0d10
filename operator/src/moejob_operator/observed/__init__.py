"""What a reconcile knows when it decides: API bodies, parsed at the edge into facts. Decides nothing, never raises.

A body that cannot be read becomes a fact about it: an unreadable last word is no last word, a job whose spec does not
parse has problems.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from types import MappingProxyType

from moejob_api.contract import PodProgress
from moejob_operator.cluster import Children, Raw
from moejob_operator.observed import reading
from moejob_operator.observed.jobs import Job, Specs, job
from moejob_operator.observed.pods import TAKEN_BY_TAINT, Ended, Pod, PodPhase, Waiting, is_unheard, pod, taken_by_taint

__all__ = [
    "TAKEN_BY_TAINT",
    "Claim",
    "ClaimPhase",
    "Ended",
    "Job",
    "Observed",
    "Pod",
    "PodPhase",
    "Specs",
    "Waiting",
    "is_unheard",
    "observed",
    "taken_by_taint",
    "with_progress",
]

_SILENCE: Mapping[str, PodProgress] = MappingProxyType({})


class ClaimPhase(StrEnum):
    """As in Kubernetes."""

    PENDING = "Pending"
    BOUND = "Bound"
    LOST = "Lost"


@dataclass(frozen=True, slots=True)
class Claim:
    """A volume claim of the job."""

    name: str
    phase: ClaimPhase


@dataclass(frozen=True, slots=True)
class Observed:
    """The job and everything that belongs to it.

    `strangers` are objects that carry the job's label but belong to another object: a job of the same name that is
    still being cleaned away. `is_live` says that the objects were listed now and not taken from the watch cache;
    `was_polled` that every trainer pod was asked, and `progress` is what they answered, by pod UID.
    """

    job: Job
    pods: tuple[Pod, ...]
    strangers: tuple[str, ...]
    services: frozenset[str]
    claims: tuple[Claim, ...]
    pod_groups: frozenset[str]
    lost_nodes: frozenset[str]
    is_live: bool
    was_polled: bool = False
    progress: Mapping[str, PodProgress] = field(default_factory=lambda: _SILENCE)


def observed(raw: Raw, children: Children, specs: Specs, *, is_live: bool) -> Observed:
    """Everything that two answers of the API server say."""
    about = job(raw, specs)
    return Observed(
        job=about,
        pods=tuple(sorted((pod(body) for body in _ours(children.pods, about)), key=lambda found: found.name)),
        strangers=tuple(sorted(_name(body) for body in children.pods if not reading.is_owned_by(body, about.uid))),
        services=frozenset(_name(body) for body in _ours(children.services, about)),
        claims=tuple(_claim(body) for body in _ours(children.claims, about)),
        pod_groups=frozenset(_name(body) for body in _ours(children.pod_groups, about)),
        lost_nodes=children.lost_nodes,
        is_live=is_live,
    )


def with_progress(seen: Observed, answers: Mapping[str, PodProgress]) -> Observed:
    """The same, with what the pods said of themselves; an answer that another pod gave is none."""
    by_uid = {found.uid: found for found in seen.pods}
    # Addresses are given to other pods soon after: what answers may be another gang.
    heard = {
        uid: answer
        for uid, answer in answers.items()
        if uid in by_uid and (answer.attempt, answer.index) == (by_uid[uid].attempt, by_uid[uid].index)
    }
    return replace(seen, was_polled=True, progress=MappingProxyType(heard))


def _ours(bodies: tuple[Raw, ...], about: Job) -> tuple[Raw, ...]:
    return tuple(body for body in bodies if reading.is_owned_by(body, about.uid))


def _name(body: Raw) -> str:
    return reading.text(reading.metadata(body).get("name"))


def _claim(body: Raw) -> Claim:
    phase = reading.text(reading.mapping(body.get("status")).get("phase"))
    return Claim(_name(body), ClaimPhase(phase) if phase in list(ClaimPhase) else ClaimPhase.PENDING)
