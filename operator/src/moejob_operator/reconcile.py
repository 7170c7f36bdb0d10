"""One look at one job: observe, decide, act, write its status, tell. Everything that waits is here, nothing is decided.

The order survives a crash anywhere. Actions are idempotent and follow from what the status says, so those that were not
done are decided again; the status follows them, so it never claims what was not done; an attempt is counted in a look
that does nothing else, and only a later look, which reads that, deletes anything.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import assert_never

from moejob_api.contract import Role
from moejob_api.restarts import LAUNCHER_FIRST_SECONDS
from moejob_operator.actions import Action, Delete, Ensure, Kind
from moejob_operator.cluster import Children, Cluster, Forbidden, JobKey, Raw
from moejob_operator.decide import Decision, decide
from moejob_operator.judging import Judge
from moejob_operator.observed import Observed, Pod, PodPhase, Specs, observed, with_progress
from moejob_operator.planning.guards import FIRST_POLL_SECONDS, POLL_SECONDS
from moejob_operator.planning.situation import Setting
from moejob_operator.planning.times import read, seconds_since
from moejob_operator.remembered import Remembered

# Objects created at once: a gang of a hundred should not wait for a hundred round trips.
_AT_ONCE = 16
# A pod looks for its Service once it runs. All else it needs before it can be placed.
_TOGETHER = (Kind.POD, Kind.SERVICE)


@dataclass(frozen=True, slots=True)
class Reconciler:
    """What every look needs. `clock` tells the time in UTC.

    `asked` is when the pods of a job were asked how they are: those that do not answer leave no trace in its status.
    """

    judge: Judge
    setting: Setting
    clock: Callable[[], datetime]
    specs: Specs = field(default_factory=Specs)
    asked: Remembered[datetime] = field(default_factory=Remembered)

    async def __call__(self, key: JobKey, cluster: Cluster) -> float | None:
        """Look at one job. Returns after how many seconds to look again, if nothing happens before."""
        return await reconcile(key, cluster, self)

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        self.judge.forget(key)
        self.specs.forget(key)
        self.asked.forget(key)


async def reconcile(key: JobKey, cluster: Cluster, means: Reconciler) -> float | None:
    """Look at one job once."""
    raw = await cluster.job(key)
    if raw is None:
        means.forget(key)
        return None
    now = means.clock()
    seen = await _observed(key, raw, cluster, now, means)
    judged = await means.judge.of(seen.job)
    decision = decide(seen, judged, means.setting, now)
    if decision.needs_live:
        seen = await _live(key, raw, cluster, seen, means.specs)
        decision = decide(seen, judged, means.setting, now)
    refusal = await _performed(decision, cluster)
    if refusal is not None:
        decision = decide(seen, judged, means.setting, now, refusal)
    await _told(raw, seen, decision, cluster)
    return decision.look_again_after_seconds


async def _observed(key: JobKey, raw: Raw, cluster: Cluster, now: datetime, means: Reconciler) -> Observed:
    children = await cluster.children(key, live=False)
    seen = observed(raw, children, means.specs, is_live=False)
    running = _to_ask(seen, means.asked.of(key, seen.job.uid), now)
    if not running:
        return seen
    means.asked.keep(key, seen.job.uid, now)
    bodies = {body["metadata"]["uid"]: body for body in children.pods}
    answers = await asyncio.gather(*(cluster.progress(bodies[pod.uid]) for pod in running))
    heard = {pod.uid: answer for pod, answer in zip(running, answers, strict=True) if answer is not None}
    return with_progress(seen, heard)


def _to_ask(seen: Observed, asked: datetime | None, now: datetime) -> tuple[Pod, ...]:
    """Pods to ask how they are: not at every event, but before anything is concluded from a silence or an end.

    `asked` is when this process asked last; the status tells when another did and was answered.
    """
    status = seen.job.status
    gang = [pod for pod in seen.pods if pod.role is Role.TRAINER and pod.attempt == status.attempt]
    running = tuple(pod for pod in gang if pod.phase is PodPhase.RUNNING)
    if status.phase is None or status.phase.is_finished or not running:
        return ()
    replaced = {entry.uid for entry in status.restarts.ladder.replacing}
    if any((pod.phase is PodPhase.FAILED or pod.is_unheard) and pod.uid not in replaced for pod in gang):
        return running
    youngest = min(seconds_since(pod.started_at, now) for pod in running)
    if len(running) < len(gang) or (youngest < FIRST_POLL_SECONDS and not all(pod.is_ready for pod in running)):
        return ()
    answered = None if status.progress is None else read(status.progress.updated_at)
    last = max((time for time in (asked, answered) if time is not None), default=None)
    is_due = last is None or _is_due(seconds_since(last, now), youngest)
    return running if is_due or _may_be_mute(seen, running, youngest) else ()


def _is_due(since: float, youngest: float) -> bool:
    """Whether to ask again, so long after the last time: soon while pods are young, and pods that are new at once."""
    return since > youngest or since >= min(POLL_SECONDS, max(FIRST_POLL_SECONDS, youngest))


def _may_be_mute(seen: Observed, running: tuple[Pod, ...], youngest: float) -> bool:
    """Whether this look would take a silence for a hang."""
    spec = seen.job.spec
    if spec is None or all(pod.is_ready for pod in running):
        return False
    return youngest >= spec.lifecycle.progress_deadline_seconds + LAUNCHER_FIRST_SECONDS


async def _live(key: JobKey, raw: Raw, cluster: Cluster, seen: Observed, specs: Specs) -> Observed:
    children: Children = await cluster.children(key, live=True)
    return replace(observed(raw, children, specs, is_live=True), was_polled=seen.was_polled, progress=seen.progress)


async def _performed(decision: Decision, cluster: Cluster) -> str | None:
    """Do it. Returns what the API server refused, if anything: a person has to hear of that."""
    first = [action for action in decision.actions if _kind(action) not in _TOGETHER]
    then = [action for action in decision.actions if _kind(action) in _TOGETHER]
    try:
        for action in first:
            await _perform(action, cluster)
        for start in range(0, len(then), _AT_ONCE):
            await _together(then[start : start + _AT_ONCE], cluster)
    except Forbidden as refused:
        return str(refused)
    return None


async def _together(actions: list[Action], cluster: Cluster) -> None:
    """All at once, and all of them to their end: none may still be on its way when the job is looked at again."""
    results = await asyncio.gather(*(_perform(action, cluster) for action in actions), return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    # A refusal is told to the user only when nothing was unclear.
    for error in sorted(errors, key=lambda error: isinstance(error, Forbidden)):
        raise error


async def _perform(action: Action, cluster: Cluster) -> None:
    match action:
        case Ensure(manifest):
            await cluster.ensure(manifest)
        case Delete(ref, grace_seconds):
            await cluster.delete(ref, grace_seconds=grace_seconds)
        case _:
            assert_never(action)


def _kind(action: Action) -> Kind:
    return Kind(action.manifest["kind"]) if isinstance(action, Ensure) else action.ref.kind


async def _told(raw: Raw, seen: Observed, decision: Decision, cluster: Cluster) -> None:
    if decision.status != seen.job.status:
        await cluster.write_status(raw, decision.status.model_dump(mode="json", by_alias=True, exclude_none=True))
    # Only what is written has happened.
    await asyncio.gather(*(cluster.post(raw, notice) for notice in decision.notices))
