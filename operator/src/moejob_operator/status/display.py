"""The columns of `kubectl get`: a printer column shows one value as it is, so the texts are made here."""

from __future__ import annotations

from moejob_api.job.status import Display, Progress
from moejob_operator.planning.observed_state import ObservedState
from moejob_operator.planning.timestamps import read, seconds_since

_UNITS = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))


def display(s: ObservedState, progress: Progress | None) -> Display | None:
    """Return the texts, unchanged while the progress is unchanged."""
    before = s.status.progress
    if progress is None or progress == before:
        return s.status.display
    rate = _seconds_per_step(s, before, progress)
    return Display(
        step=steps(progress),
        score=score(progress),
        eval_score=_number(progress.eval_score),
        eval_loss=_number(progress.eval_loss),
        speed=""
        if progress.tokens_per_second_per_gpu is None
        else f"{short(progress.tokens_per_second_per_gpu)} tok/s",
        eta=_eta(progress, rate),
    )


def steps(progress: Progress) -> str:
    """Such as 120/500."""
    return str(progress.step) if progress.total_steps is None else f"{progress.step}/{progress.total_steps}"


def score(progress: Progress) -> str:
    """The reward when there is one, else the loss."""
    return _number(progress.loss if progress.reward is None else progress.reward)


def short(value: float) -> str:
    """Such as 870, 1.2k or 3.4M."""
    for factor, letter in ((1e6, "M"), (1e3, "k")):
        if value >= factor * 0.9995:
            return f"{value / factor:.1f}{letter}"
    return f"{value:.0f}"


def duration(seconds: float) -> str:
    """The two largest units that count, such as 3h12m or 45s."""
    left = round(seconds)
    for number, (size, unit) in enumerate(_UNITS[:-1]):
        if left >= size:
            smaller, name = _UNITS[number + 1]
            rest = left % size // smaller
            return f"{left // size}{unit}{rest}{name}" if rest else f"{left // size}{unit}"
    return f"{left}s"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _eta(progress: Progress, seconds_per_step: float | None) -> str:
    if progress.total_steps is None or seconds_per_step is None or progress.step >= progress.total_steps:
        return ""
    return duration((progress.total_steps - progress.step) * seconds_per_step)


def _seconds_per_step(s: ObservedState, before: Progress | None, now: Progress) -> float | None:
    if before is None or now.step <= before.step:
        return None
    since = read(before.updated_at)
    first = s.trainers.get(0)
    # The time in which a gang was started again says nothing about the speed of its steps.
    if since is None or first is None or first.started_at is None or first.started_at > since:
        return None
    return seconds_since(since, s.now) / (now.step - before.step)
