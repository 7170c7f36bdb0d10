"""The choice of pods to poll, and of the time: a poll costs a request for each pod.

Pure: knows the observed objects and the time of the last poll, and sends nothing itself.
"""

from __future__ import annotations

from datetime import datetime

from moejob_api.contract.pods import PodRole
from moejob_api.recovery.restarts import LAUNCHER_FIRST_SECONDS
from moejob_operator.observed import Observation, Pod, PodPhase
from moejob_operator.planning.phase_guards import POLL_AGES, POLL_SECONDS
from moejob_operator.planning.timestamps import parse_time, seconds_since


def pods_to_poll(observation: Observation, last_poll: datetime | None, now: datetime) -> tuple[Pod, ...]:
    """Return the pods to poll now: not at every event, but before a silence or an end leads to a decision.

    The last poll is this process's own, or an earlier one whose time the status has.
    """
    status = observation.job.status
    gang = [pod for pod in observation.pods if pod.role is PodRole.TRAINER and pod.attempt == status.attempt]
    running = tuple(pod for pod in gang if pod.phase is PodPhase.RUNNING)
    if status.phase is None or status.phase.is_finished or not running:
        return ()
    replaced = {entry.uid for entry in status.restarts.ladder.replacing}
    if any((pod.phase is PodPhase.FAILED or pod.is_unheard) and pod.uid not in replaced for pod in gang):
        return running
    youngest = min(seconds_since(pod.started_at, now) for pod in running)
    nodes = len(gang) if status.layout is None else min(len(gang), status.layout.nodes)
    if len(running) < nodes or (youngest < POLL_AGES[0] and not all(pod.is_ready for pod in running)):
        return ()
    last_report = None if status.progress is None else parse_time(status.progress.updated_at)
    latest = max((time for time in (last_poll, last_report) if time is not None), default=None)
    is_due = latest is None or _is_due(seconds_since(latest, now), youngest)
    return running if is_due or _can_be_hung(observation, running, youngest) else ()


def _is_due(elapsed: float, youngest: float) -> bool:
    """Return whether a poll is due this long after the last one: at certain ages, and new pods at once."""
    # Worked example: at 12 s a pod has reached the age 10 s, so a poll is due unless the last one is at most 2 s old.
    reached = max((age for age in POLL_AGES if age <= youngest), default=0.0)
    return elapsed > youngest - reached or elapsed >= POLL_SECONDS


def _can_be_hung(observation: Observation, running: tuple[Pod, ...], youngest: float) -> bool:
    """Return whether this reconcile would call a silent pod hung."""
    spec = observation.job.spec
    nodes = None if observation.job.status.layout is None else observation.job.status.layout.nodes
    ready_count = sum(pod.is_ready for pod in running)
    # A spare is never ready.
    if spec is None or ready_count >= min(len(running), nodes or len(running)):
        return False
    return youngest >= spec.lifecycle.progress_deadline_seconds + LAUNCHER_FIRST_SECONDS
