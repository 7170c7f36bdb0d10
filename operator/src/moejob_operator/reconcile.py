"""One reconciliation of one job: observe, decide, act, write its status, post events.

Everything that waits is here, nothing is decided. The order survives a crash anywhere:

- Actions are idempotent and follow from the status, so the next reconcile decides unfinished ones again.
- The status is written after the actions, so it never claims an action that was not done.
- A new attempt is counted in a reconcile that does nothing else; a later one reads the count, and only then deletes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import assert_never

from moejob_operator.actions import WRITE_ONLY, Action, Delete, Ensure, Kind
from moejob_operator.cluster import Children, Cluster, Forbidden, JobKey, Raw
from moejob_operator.decide import Reconciliation, decide
from moejob_operator.expiring_cache import ExpiringCache
from moejob_operator.observed import Job, Observed, PodReadings, Specs, observed, with_progress
from moejob_operator.planning.observed_state import Setting
from moejob_operator.planning.polling import pods_to_ask
from moejob_operator.validation import Validator

# Objects created at once: a gang of a hundred should not wait for a hundred round trips.
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Reconciler:
    """The parts of every reconcile. `clock` returns the time in UTC."""

    validator: Validator
    setting: Setting
    clock: Callable[[], datetime]
    specs: Specs = field(default_factory=Specs)
    # When the pods of each job were polled last: pods that do not reply leave no trace in the status.
    asked: ExpiringCache[datetime] = field(default_factory=ExpiringCache)
    # The attempt for which the Secret and the policy of each job were created last: no watch shows these.
    access: ExpiringCache[int] = field(default_factory=ExpiringCache)
    readings: PodReadings = field(default_factory=PodReadings)

    async def __call__(self, key: JobKey, cluster: Cluster) -> float | None:
        """Reconcile one job; return the seconds until the next reconcile, if no event comes before."""
        return await reconcile(key, cluster, self)

    def forget(self, key: JobKey) -> None:
        """The job is gone."""
        self.validator.forget(key)
        self.specs.forget(key)
        self.asked.forget(key)
        self.access.forget(key)
        self.readings.forget(key)


async def reconcile(key: JobKey, cluster: Cluster, reconciler: Reconciler) -> float | None:
    """Reconcile one job once."""
    raw = await cluster.job(key)
    if raw is None:
        reconciler.forget(key)
        return None
    now = reconciler.clock()
    seen = await _observed(key, raw, cluster, now, reconciler)
    validation = await reconciler.validator.of(seen.job)
    planned = decide(seen, validation, reconciler.setting, now)
    if planned.needs_live:
        seen = await _live(key, raw, cluster, seen, reconciler)
        seen = replace(seen, lacks_secret=await _lacks_secret(planned, seen, cluster))
        planned = decide(seen, validation, reconciler.setting, now)
    refusal = await _performed(planned, seen.job, cluster, reconciler)
    if refusal is not None:
        planned = decide(seen, validation, reconciler.setting, now, refusal)
    await _report(raw, seen, planned, cluster)
    return planned.requeue_after_seconds


async def _observed(key: JobKey, raw: Raw, cluster: Cluster, now: datetime, reconciler: Reconciler) -> Observed:
    children = await cluster.children(key, live=False)
    seen = observed(raw, children, reconciler.specs, reconciler.readings)
    seen = replace(seen, has_access=reconciler.access.of(key, seen.job.uid) == seen.job.status.attempt)
    running = pods_to_ask(seen, reconciler.asked.of(key, seen.job.uid), now)
    if not running:
        return seen
    reconciler.asked.keep(key, seen.job.uid, now)
    bodies = {body["metadata"]["uid"]: body for body in children.pods}
    answers = await asyncio.gather(*(cluster.progress(bodies[pod.uid]) for pod in running))
    received = {pod.uid: answer for pod, answer in zip(running, answers, strict=True) if answer is not None}
    return with_progress(seen, received)


async def _live(key: JobKey, raw: Raw, cluster: Cluster, seen: Observed, reconciler: Reconciler) -> Observed:
    children: Children = await cluster.children(key, live=True)
    return replace(
        observed(raw, children, reconciler.specs, reconciler.readings),
        was_polled=seen.was_polled,
        has_access=seen.has_access,
        progress=seen.progress,
    )


async def _lacks_secret(planned: Reconciliation, seen: Observed, cluster: Cluster) -> bool:
    """Ask before the Secret is created again: it would get another value, which running pods would refuse."""
    secret = next((action for action in planned.actions if _kind(action) is Kind.SECRET), None)
    if not isinstance(secret, Ensure) or not seen.holds_secret:
        return False
    return await cluster.lacks(secret.manifest)


async def _performed(planned: Reconciliation, job: Job, cluster: Cluster, reconciler: Reconciler) -> str | None:
    """Perform all actions; return the refusal of the API server, if any, which the status has to show."""
    # Shared objects exist and are the job's own before its pods do: a foreign Service would lead them to other pods.
    shared = [action for action in planned.actions if _kind(action) is not Kind.POD]
    pods = [action for action in planned.actions if _kind(action) is Kind.POD]
    try:
        await _in_turn(shared, cluster)
        if any(_kind(action) in WRITE_ONLY for action in shared):
            reconciler.access.keep(job.key, job.uid, job.status.attempt)
        await _in_turn(pods, cluster)
    except Forbidden as refused:
        return str(refused)
    return None


async def _in_turn(actions: list[Action], cluster: Cluster) -> None:
    for start in range(0, len(actions), _AT_ONCE):
        await _together(actions[start : start + _AT_ONCE], cluster)


async def _together(actions: list[Action], cluster: Cluster) -> None:
    """Perform actions at once, and wait for all: none may be under way when the job is reconciled again."""
    results = await asyncio.gather(*(_perform(action, cluster) for action in actions), return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    # A refusal reaches the user only when nothing was unclear.
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


async def _report(raw: Raw, seen: Observed, planned: Reconciliation, cluster: Cluster) -> None:
    if planned.status != seen.job.status:
        await cluster.write_status(raw, planned.status.model_dump(mode="json", by_alias=True, exclude_none=True))
    # Only what is written has happened.
    await asyncio.gather(*(cluster.post(raw, event) for event in planned.events))
