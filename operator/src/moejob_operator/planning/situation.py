"""Everything that guards look at, worked out once: whose pods are whose, and what the status remembers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from types import MappingProxyType

from moejob_api.contract import Role, RunProgress
from moejob_api.job import Spec
from moejob_api.job.lifecycle import Gang
from moejob_api.job.status import Ladder, Phase, Restarts, Status
from moejob_api.layout.sizes import Layout
from moejob_operator.children.blueprint import Blueprint, Images
from moejob_operator.children.gangs import GangApi, chosen_gang
from moejob_operator.judging import Judgement
from moejob_operator.observed import Observed, Pod, PodPhase
from moejob_operator.planning.times import read

# Until a save was measured. What is left of it when the save is done is not waited for.
DEFAULT_GRACE_SECONDS = 300
_SHORTEST_GRACE_SECONDS = 60
_LONGEST_GRACE_SECONDS = 3600


@dataclass(frozen=True, slots=True)
class Setting:
    """What the operator brings along: images for jobs that name none, and the gang APIs of the cluster."""

    images: Images
    gang_apis: frozenset[GangApi] = frozenset()


@dataclass(frozen=True, slots=True)
class Situation:
    """One look at one job. `trainers` are those of the present attempt by index, `old` those of any other."""

    seen: Observed
    judged: Judgement
    setting: Setting
    now: datetime
    attempt: int
    restarts: Restarts
    trainers: Mapping[int, Pod]
    old: tuple[Pod, ...]
    rollouts: tuple[Pod, ...]
    # What the API server said to the actions of this very look, which is then decided again.
    refusal: str | None = None

    @property
    def status(self) -> Status:
        """The status as it was written last."""
        return self.seen.job.status

    @property
    def ladder(self) -> Ladder:
        """What is remembered between looks, after a new checkpoint has renewed the budget."""
        return self.restarts.ladder

    @property
    def gang_runs(self) -> bool:
        """Whether every trainer pod runs, or has ended well while others still run."""
        layout = self.judged.layout
        return (
            layout is not None
            and len(self.trainers) == layout.nodes
            and all(pod.phase in (PodPhase.RUNNING, PodPhase.SUCCEEDED) for pod in self.trainers.values())
        )

    @property
    def gang_succeeded(self) -> bool:
        """Whether every trainer pod has ended well."""
        layout = self.judged.layout
        return (
            layout is not None
            and len(self.trainers) == layout.nodes
            and all(pod.phase is PodPhase.SUCCEEDED for pod in self.trainers.values())
        )

    @property
    def run(self) -> RunProgress | None:
        """What pod 0 says of the run: just now, or as its last word; of a gang that was stopped, its last word too."""
        first = self.trainers.get(0) or self._last_first
        if first is None:
            return None
        heard = self.seen.progress.get(first.uid)
        last = None if first.ended is None else first.ended.word
        return heard.run if heard is not None else None if last is None else last.run

    @property
    def _last_first(self) -> Pod | None:
        """Pod 0 of the gang before the next one: what it saved while it was stopped nobody else can tell."""
        before = (pod for pod in self.old if pod.index == 0 and pod.attempt == self.attempt - 1)
        return next(before, None)


def situation(
    seen: Observed, judged: Judgement, setting: Setting, now: datetime, refusal: str | None = None
) -> Situation:
    """What guards look at."""
    # Never below what is there: a status that was lost or is stale must not make the present gang an old one.
    attempt = max([seen.job.status.attempt, *(pod.attempt or 0 for pod in seen.pods if pod.role is Role.TRAINER)])
    rollouts = tuple(pod for pod in seen.pods if pod.role is Role.ROLLOUT)
    nodes = judged.layout.nodes if judged.layout is not None else 0
    present = {
        pod.index: pod
        for pod in seen.pods
        if pod.role is Role.TRAINER and pod.attempt == attempt and pod.index is not None and pod.index < nodes
    }
    found = Situation(
        seen=seen,
        judged=judged,
        setting=setting,
        now=now,
        attempt=attempt,
        restarts=seen.job.status.restarts,
        trainers=MappingProxyType(present),
        old=tuple(pod for pod in seen.pods if pod.role is not Role.ROLLOUT and pod not in present.values()),
        rollouts=rollouts,
        refusal=refusal,
    )
    return replace(found, restarts=_renewed(found))


def _renewed(s: Situation) -> Restarts:
    """The budget, forgiven when a checkpoint is newer than any before."""
    saved, known = None if s.run is None else s.run.last_checkpoint_step, s.ladder.checkpoint_step
    if saved is None or saved == known:
        return s.restarts
    moved = s.ladder.model_copy(update={"checkpoint_step": saved})
    # A lower one is an older one: the newest could not be read. What was spent stays spent.
    if known is not None and saved < known:
        return s.restarts.model_copy(update={"ladder": moved})
    fresh = moved.model_copy(update={"in_place": 0, "pods": 0, "uncounted": 0})
    return s.restarts.model_copy(update={"since_checkpoint": 0, "ladder": fresh})


def spec_and_layout(s: Situation) -> tuple[Spec, Layout]:
    """What an accepted job has; guards behind `invalid` may rely on it."""
    spec, layout = s.seen.job.spec, s.judged.layout
    if spec is None or layout is None:
        raise AssertionError(f"{s.seen.job.namespace}/{s.seen.job.name} was planned without being accepted")
    return spec, layout


def gang_of(s: Situation) -> Gang:
    """The gang scheduler of the job."""
    spec, _ = spec_and_layout(s)
    return chosen_gang(spec.lifecycle, s.setting.gang_apis)


def blueprint(s: Situation) -> Blueprint:
    """What the manifests of the present attempt follow from."""
    spec, layout = spec_and_layout(s)
    job = s.seen.job
    return Blueprint(
        name=job.name,
        namespace=job.namespace,
        uid=job.uid,
        spec=spec,
        layout=layout,
        rollout=s.judged.rollout,
        attempt=s.attempt,
        gang=gang_of(s),
        images=s.setting.images,
        trainer_grace_seconds=grace_seconds(s.status),
    )


def grace_seconds(status: Status) -> int:
    """How long a pod gets to save when it is asked to stop: twice what the last save took, and time to stop ranks."""
    measured = None if status.progress is None else status.progress.save_seconds
    if measured is None:
        return DEFAULT_GRACE_SECONDS
    return max(_SHORTEST_GRACE_SECONDS, min(_LONGEST_GRACE_SECONDS, round(2 * measured) + 30))


def started_at(s: Situation) -> datetime | None:
    """When pods of the job were first created."""
    known = read(s.status.start_time)
    created = [pod.created_at for pod in s.seen.pods if pod.created_at is not None]
    return known if known is not None else min(created, default=None)


def restarting_or_pending(s: Situation) -> Phase:
    """The phase of a gang that does not run."""
    return Phase.RESTARTING if s.ladder.start_after is not None else Phase.PENDING
