"""The choice of pods to poll, and of the time: a poll costs a request for each.

Pure: knows what was observed and when was last asked, and asks nothing itself.
"""

from __future__ import annotations

from datetime import datetime

from moejob_api.contract.pods import Role
from moejob_api.recovery.restarts import LAUNCHER_FIRST_SECONDS
from moejob_operator.observed import Observed, Pod, PodPhase
from moejob_operator.planning.guard_clauses import POLL_AGES, POLL_SECONDS
from moejob_operator.planning.timestamps import read, seconds_since


def pods_to_ask(seen: Observed, asked: datetime | None, now: datetime) -> tuple[Pod, ...]:
    """Return the pods to ask how they are: not at every event, but before concluding from a silence or an end.

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
    if len(running) < len(gang) or (youngest < POLL_AGES[0] and not all(pod.is_ready for pod in running)):
        return ()
    answered = None if status.progress is None else read(status.progress.updated_at)
    last = max((time for time in (asked, answered) if time is not None), default=None)
    is_due = last is None or _is_due(seconds_since(last, now), youngest)
    return running if is_due or _may_be_mute(seen, running, youngest) else ()


def _is_due(since: float, youngest: float) -> bool:
    """Return whether a poll is due this long after the last one: at certain ages, and new pods at once."""
    reached = max((age for age in POLL_AGES if age <= youngest), default=0.0)
    return since > youngest - reached or since >= POLL_SECONDS


def _may_be_mute(seen: Observed, running: tuple[Pod, ...], youngest: float) -> bool:
    """Return whether this reconcile would take a silence for a hang."""
    spec = seen.job.spec
    if spec is None or all(pod.is_ready for pod in running):
        return False
    return youngest >= spec.lifecycle.progress_deadline_seconds + LAUNCHER_FIRST_SECONDS
