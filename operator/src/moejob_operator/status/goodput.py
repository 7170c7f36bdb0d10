"""Goodput: each second since pods were first created is productive, lost, starting or suspended.

The sums grow whenever the phase changes, something fails, or the run has news: then the status is written anyway. Where
ranks were started in that time, the trainer reports how long they have done steps. All steps count as equally long.
"""

from __future__ import annotations

from datetime import datetime
from enum import StrEnum

from moejob_api.job.resources import Accelerator
from moejob_api.job.status import ConditionType, Goodput, Phase, Progress
from moejob_operator.planning.decision import Decision
from moejob_operator.planning.observed_state import ObservedState, job_start_time
from moejob_operator.planning.timestamps import cut_to_seconds, format_time, parse_time, seconds_since
from moejob_operator.status.conditions import written_condition

_SECONDS_PER_HOUR = 3600.0


class _TimeUse(StrEnum):
    """The sums, by the names of their fields."""

    PRODUCTIVE = "productive_seconds"
    STARTING = "starting_seconds"
    LOST = "lost_seconds"
    SUSPENDED = "suspended_seconds"


def account_goodput(s: ObservedState, decision: Decision, progress: Progress | None) -> Goodput | None:
    """Return the sums until now; unchanged while nothing shows what the time was used for."""
    before = s.status.goodput or Goodput()
    reported_until = parse_time(before.updated_at) or job_start_time(s)
    if reported_until is None or not _is_reported(s, decision, progress):
        return s.status.goodput
    # Another operator's clock may have been ahead of this one's.
    now = max(reported_until, cut_to_seconds(s.now))
    seconds = seconds_since(reported_until, now)
    stepping = min(seconds, _stepping_seconds(s, progress))
    remainder, use = seconds - stepping, _use_of_rest(s, decision)
    redone = _redone_seconds(s, before, progress)
    sums = {each: getattr(before, each) for each in _TimeUse}
    sums[_TimeUse.PRODUCTIVE] += stepping - redone
    sums[_TimeUse.LOST] += redone
    sums[use] += remainder
    lost_gpu_seconds = 0.0
    if _has_gpus(s):
        lost_gpu_seconds = redone * _count_gpus(s) + (_held_gpu_seconds(s, remainder) if use is _TimeUse.LOST else 0.0)
    return Goodput(
        **{each: round(sums[each], 1) for each in _TimeUse},
        lost_gpu_hours=round(before.lost_gpu_hours + lost_gpu_seconds / _SECONDS_PER_HOUR, 4),
        updated_at=format_time(now),
    )


def _is_reported(s: ObservedState, decision: Decision, progress: Progress | None) -> bool:
    if s.status.phase is Phase.SUSPENDED:
        return decision.phase is not Phase.SUSPENDED
    return decision.phase is not s.status.phase or decision.failure is not None or progress != s.status.progress


def _stepping_seconds(s: ObservedState, progress: Progress | None) -> float:
    """Return the seconds for which the present ranks have done steps, when that is news."""
    is_news = progress is not None and progress != s.status.progress and s.status.phase is not Phase.SUSPENDED
    return (s.run_progress.stepping_seconds or 0.0) if is_news and s.run_progress is not None else 0.0


def _use_of_rest(s: ObservedState, decision: Decision) -> _TimeUse:
    if s.status.phase is Phase.SUSPENDED:
        return _TimeUse.SUSPENDED
    if decision.failure is not None or _is_recovering(s):
        return _TimeUse.LOST
    if _is_unheard_of(s) and decision.phase is not Phase.SUCCEEDED:
        return _TimeUse.STARTING
    return _TimeUse.PRODUCTIVE


def _is_recovering(s: ObservedState) -> bool:
    """Return whether the run has not reported since it failed; a run suspended since then starts as any other."""
    failed_at = parse_time(None if s.status.last_failure is None else s.status.last_failure.time)
    pause = written_condition(s.status, ConditionType.SUSPENDED)
    since = (_last_report_time(s), parse_time(None if pause is None else pause.last_transition_time))
    return failed_at is not None and all(time is None or time <= failed_at for time in since)


def _is_unheard_of(s: ObservedState) -> bool:
    """Return whether nothing has been heard of a run of these pods."""
    heard_at = _last_report_time(s)
    newest = max((pod.created_at for pod in s.trainers.values() if pod.created_at is not None), default=None)
    return heard_at is None or (newest is not None and heard_at < newest)


def _redone_seconds(s: ObservedState, before: Goodput, progress: Progress | None) -> float:
    last_progress = s.status.progress
    if last_progress is None or progress is None or progress.step >= last_progress.step:
        return 0.0
    return before.productive_seconds * (last_progress.step - progress.step) / last_progress.step


def _held_gpu_seconds(s: ObservedState, seconds: float) -> float:
    """Return the GPU seconds of the existing pods since the last look: a pod that waits for a node holds no GPU."""
    layout, rollout = s.validation.layout, s.validation.rollout
    trainers = 0 if layout is None else layout.gpus_per_pod
    engines = 0 if rollout is None else rollout.tensor
    pod_gpus = [(pod, trainers) for pod in s.trainers.values()] + [(pod, engines) for pod in s.rollouts]
    return sum(min(seconds, seconds_since(pod.started_at, s.now)) * gpus for pod, gpus in pod_gpus)


def _last_report_time(s: ObservedState) -> datetime | None:
    return None if s.status.progress is None else parse_time(s.status.progress.updated_at)


def _has_gpus(s: ObservedState) -> bool:
    spec = s.observation.job.spec
    return spec is not None and spec.resources.accelerator is Accelerator.GPU


def _count_gpus(s: ObservedState) -> int:
    layout, rollout = s.validation.layout, s.validation.rollout
    return (0 if layout is None else layout.gpus) + (0 if rollout is None else rollout.gpus)
