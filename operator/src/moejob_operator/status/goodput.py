"""Where the time went, added up whenever the progress is written. An estimate: steps are taken to last equally long."""

from __future__ import annotations

from moejob_api.job.status import ConditionStatus, ConditionType, Goodput, Phase, Progress
from moejob_operator.planning.situation import Situation
from moejob_operator.planning.step import Step
from moejob_operator.planning.times import read, seconds_since
from moejob_operator.status.conditions import condition

_SECONDS_PER_HOUR = 3600.0


def goodput(s: Situation, step: Step, progress: Progress | None) -> Goodput | None:
    """The sums; as they were when there is nothing to add."""
    paused = _pause_that_ends_seconds(s, step)
    is_end = step.phase is Phase.SUCCEEDED
    if not paused and progress == s.status.progress and not is_end:
        return s.status.goodput
    before = s.status.goodput or Goodput()
    starting = _starting_seconds(s) if progress != s.status.progress else 0.0
    redone = _redone_seconds(s, before, progress)
    advanced = 0.0 if starting else _advanced_seconds(s, progress, is_end=is_end)
    is_restart = s.restarts.total + s.restarts.pods > 0
    lost = redone + (starting if is_restart else 0.0)
    return Goodput(
        productive_seconds=_rounded(before.productive_seconds + advanced - redone),
        lost_seconds=_rounded(before.lost_seconds + redone),
        starting_seconds=_rounded(before.starting_seconds + starting),
        suspended_seconds=_rounded(before.suspended_seconds + paused),
        lost_gpu_hours=round(before.lost_gpu_hours + lost * _gpus(s) / _SECONDS_PER_HOUR, 3),
    )


def _pause_that_ends_seconds(s: Situation, step: Step) -> float:
    found = condition(s.status, ConditionType.SUSPENDED)
    if found is None or found.status is not ConditionStatus.TRUE or step.phase is Phase.SUSPENDED:
        return 0.0
    return seconds_since(read(found.last_transition_time), s.now)


def _starting_seconds(s: Situation) -> float:
    """From the creation of the youngest pod until now, when it reports for the first time."""
    known = None if s.status.progress is None else read(s.status.progress.updated_at)
    created = max((pod.created_at for pod in s.trainers.values() if pod.created_at is not None), default=None)
    if created is None or (known is not None and created <= known):
        return 0.0
    return seconds_since(created, s.now)


def _redone_seconds(s: Situation, before: Goodput, progress: Progress | None) -> float:
    known = s.status.progress
    if known is None or progress is None or progress.step >= known.step:
        return 0.0
    return before.productive_seconds * (known.step - progress.step) / known.step


def _advanced_seconds(s: Situation, progress: Progress | None, *, is_end: bool) -> float:
    known = s.status.progress
    if known is None or progress is None or (progress.step <= known.step and not is_end):
        return 0.0
    return seconds_since(read(known.updated_at), s.now)


def _gpus(s: Situation) -> int:
    return 0 if s.judged.layout is None else s.judged.layout.gpus


def _rounded(seconds: float) -> float:
    return round(max(0.0, seconds), 1)
