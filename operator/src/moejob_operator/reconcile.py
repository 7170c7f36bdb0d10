"""One reconciliation of one job: observe, decide, act, write its status, post events.

Everything that waits is here, nothing is decided. The order survives a crash anywhere:

- Actions are idempotent and follow from the status, so the next reconcile decides unfinished ones again.
- The status is written after the actions, so it never claims an action that was not done.
- A new attempt is counted in a reconcile that does nothing else; a later one reads the count, and only then deletes.
  So are the values that a job takes from its profile, before anything is created of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import assert_never

from moejob_operator.actions import WRITE_ONLY, Action, Delete, Ensure, Kind
from moejob_operator.cluster import Children, Cluster, Forbidden, JobKey, Raw
from moejob_operator.decide import Reconciliation, plan_reconciliation
from moejob_operator.expiring_cache import ExpiringCache
from moejob_operator.observed import (
    Job,
    Observation,
    PodReadings,
    SpecCache,
    named_profile,
    needs_profile,
    read_observation,
    with_progress,
)
from moejob_operator.planning.observed_state import OperatorSetting
from moejob_operator.planning.polling import pods_to_poll
from moejob_operator.validation import Validator

# Objects created at once: a gang of a hundred should not wait for a hundred round trips.
_AT_ONCE = 16


@dataclass(frozen=True, slots=True)
class Reconciler:
    """The parts of every reconcile. `clock` returns the time in UTC."""

    validator: Validator
    setting: OperatorSetting
    clock: Callable[[], datetime]
    specs: SpecCache = field(default_factory=SpecCache)
    # When the pods of each job were polled last: pods that do not reply leave no trace in the status.
    poll_times: ExpiringCache[datetime] = field(default_factory=ExpiringCache)
    # The attempt for which the Secret and the policy of each job were created last: no watch shows these.
    access_attempts: ExpiringCache[int] = field(default_factory=ExpiringCache)
    readings: PodReadings = field(default_factory=PodReadings)

    async def __call__(self, key: JobKey, cluster: Cluster) -> float | None:
        """Reconcile one job; return the seconds until the next reconcile, if no event comes before."""
        return await reconcile_job(key, cluster, self)

    def forget(self, key: JobKey) -> None:
        """Let every cache drop a job that is gone."""
        self.validator.forget(key)
        self.specs.forget(key)
        self.poll_times.forget(key)
        self.access_attempts.forget(key)
        self.readings.forget(key)


async def reconcile_job(key: JobKey, cluster: Cluster, reconciler: Reconciler) -> float | None:
    """Reconcile one job once."""
    raw = await cluster.get_job(key)
    if raw is None:
        reconciler.forget(key)
        return None
    now = reconciler.clock()
    observation = await _observe_job(key, raw, cluster, now, reconciler)
    validation = await reconciler.validator.validate_job(observation.job)
    planned = plan_reconciliation(observation, validation, reconciler.setting, now)
    if planned.needs_live:
        observation = await _observe_live(key, raw, cluster, observation, reconciler)
        observation = replace(observation, lacks_secret=await _lacks_secret(planned, observation, cluster))
        planned = plan_reconciliation(observation, validation, reconciler.setting, now)
    refusal = await _perform_actions(planned, observation.job, cluster, reconciler)
    if refusal is not None:
        planned = plan_reconciliation(observation, validation, reconciler.setting, now, refusal)
    await _report_outcome(raw, observation, planned, cluster)
    return planned.requeue_after_seconds


async def _observe_job(key: JobKey, raw: Raw, cluster: Cluster, now: datetime, reconciler: Reconciler) -> Observation:
    children = await cluster.list_children(key, live=False)
    profile = await cluster.find_profile(key.namespace, named_profile(raw) or "") if needs_profile(raw) else None
    observation = read_observation(raw, children, reconciler.specs, reconciler.readings, profile)
    observation = replace(
        observation,
        has_access=reconciler.access_attempts.get(key, observation.job.uid) == observation.job.status.attempt,
    )
    running = pods_to_poll(observation, reconciler.poll_times.get(key, observation.job.uid), now)
    if not running:
        return observation
    reconciler.poll_times.store(key, observation.job.uid, now)
    bodies = {body["metadata"]["uid"]: body for body in children.pods}
    replies = await asyncio.gather(*(cluster.get_progress(bodies[pod.uid]) for pod in running))
    progress_by_uid = {pod.uid: reply for pod, reply in zip(running, replies, strict=True) if reply is not None}
    return with_progress(observation, progress_by_uid)


async def _observe_live(
    key: JobKey, raw: Raw, cluster: Cluster, observation: Observation, reconciler: Reconciler
) -> Observation:
    children: Children = await cluster.list_children(key, live=True)
    return replace(
        read_observation(raw, children, reconciler.specs, reconciler.readings),
        # With the profile, which is read once in a reconcile: a decision on another one would be another decision.
        job=observation.job,
        was_polled=observation.was_polled,
        has_access=observation.has_access,
        progress=observation.progress,
    )


async def _lacks_secret(planned: Reconciliation, observation: Observation, cluster: Cluster) -> bool:
    """Ask before the Secret is created again: it would get another value, which running pods would refuse."""
    secret = next((action for action in planned.actions if _action_kind(action) is Kind.SECRET), None)
    if not isinstance(secret, Ensure) or not observation.holds_secret:
        return False
    return await cluster.is_missing(secret.manifest)


async def _perform_actions(planned: Reconciliation, job: Job, cluster: Cluster, reconciler: Reconciler) -> str | None:
    """Perform all actions; return the refusal of the API server, if any, which the status has to show."""
    # Shared objects exist and are the job's own before its pods do: a foreign Service would lead them to other pods.
    shared = [action for action in planned.actions if _action_kind(action) is not Kind.POD]
    pods = [action for action in planned.actions if _action_kind(action) is Kind.POD]
    try:
        await _perform_in_turn(shared, cluster)
        if any(_action_kind(action) in WRITE_ONLY for action in shared):
            reconciler.access_attempts.store(job.key, job.uid, job.status.attempt)
        await _perform_in_turn(pods, cluster)
    except Forbidden as refusal:
        return str(refusal)
    return None


async def _perform_in_turn(actions: list[Action], cluster: Cluster) -> None:
    for start in range(0, len(actions), _AT_ONCE):
        await _perform_together(actions[start : start + _AT_ONCE], cluster)


async def _perform_together(actions: list[Action], cluster: Cluster) -> None:
    """Perform actions at once, and wait for all: none may be under way when the job is reconciled again."""
    results = await asyncio.gather(*(_perform_action(action, cluster) for action in actions), return_exceptions=True)
    errors = [result for result in results if isinstance(result, BaseException)]
    # A refusal reaches the user only when nothing was unclear.
    for error in sorted(errors, key=lambda error: isinstance(error, Forbidden)):
        raise error


async def _perform_action(action: Action, cluster: Cluster) -> None:
    match action:
        case Ensure(manifest):
            await cluster.ensure(manifest)
        case Delete(ref, grace_seconds):
            await cluster.delete(ref, grace_seconds=grace_seconds)
        case _:
            assert_never(action)


def _action_kind(action: Action) -> Kind:
    return Kind(action.manifest["kind"]) if isinstance(action, Ensure) else action.ref.kind


async def _report_outcome(raw: Raw, observation: Observation, planned: Reconciliation, cluster: Cluster) -> None:
    if planned.status != observation.job.status:
        await cluster.write_status(raw, planned.status.model_dump(mode="json", by_alias=True, exclude_none=True))
    # Only what is written has happened.
    await asyncio.gather(*(cluster.post_event(raw, event) for event in planned.events))
