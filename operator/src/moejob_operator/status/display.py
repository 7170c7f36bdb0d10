"""The columns of `kubectl get`: a printer column shows one value as it is, so the texts are made here."""

from __future__ import annotations

from moejob_api.job.status import DisplayTexts, Progress
from moejob_operator.planning.observed_state import ObservedState
from moejob_operator.planning.timestamps import parse_time, seconds_since

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))


def build_display(s: ObservedState, progress: Progress | None) -> DisplayTexts | None:
    """Return the texts, unchanged while the progress is unchanged."""
    before = s.status.progress
    if progress is None or progress == before:
        return s.status.display
    rate = _seconds_per_step(s, before, progress)
    return DisplayTexts(
        step=step_text(progress),
        score=score_text(progress),
        eval_score=_number_text(progress.eval_score),
        eval_loss=_number_text(progress.eval_loss),
        speed=""
        if progress.tokens_per_second_per_gpu is None
        else f"{short_number(progress.tokens_per_second_per_gpu)} tok/s",
        eta=_eta_text(progress, rate),
    )


def step_text(progress: Progress) -> str:
    """Such as 120/500."""
    return str(progress.step) if progress.total_steps is None else f"{progress.step}/{progress.total_steps}"


def score_text(progress: Progress) -> str:
    """The reward when there is one, else the loss."""
    return _number_text(progress.loss if progress.reward is None else progress.reward)


def short_number(value: float) -> str:
    """Such as 870, 1.2k or 3.4M."""
    for factor, letter in ((1e6, "M"), (1e3, "k")):
        if value >= factor * 0.9995:
            return f"{value / factor:.1f}{letter}"
    return f"{value:.0f}"


def duration_text(seconds: float) -> str:
    """The two largest units that count, such as 3h12m or 45s."""
    seconds_left = round(seconds)
    for number, (size, unit) in enumerate(_UNITS[:-1]):
        if seconds_left >= size:
            smaller, name = _UNITS[number + 1]
            smaller_count = seconds_left % size // smaller
            return (
                f"{seconds_left // size}{unit}{smaller_count}{name}"
                if smaller_count
                else f"{seconds_left // size}{unit}"
            )
    return f"{seconds_left}s"


def _number_text(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _eta_text(progress: Progress, seconds_per_step: float | None) -> str:
    if progress.total_steps is None or seconds_per_step is None or progress.step >= progress.total_steps:
        return ""
    return duration_text((progress.total_steps - progress.step) * seconds_per_step)


def _seconds_per_step(s: ObservedState, before: Progress | None, now: Progress) -> float | None:
    if before is None or now.step <= before.step:
        return None
    since = parse_time(before.updated_at)
    first = s.trainers.get(0)
    # The time in which a gang was started again says nothing about the speed of its steps.
    if since is None or first is None or first.started_at is None or first.started_at > since:
        return None
    return seconds_since(since, s.now) / (now.step - before.step)
