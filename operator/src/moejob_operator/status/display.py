"""The columns of `kubectl get`: a printer column shows one value as it is, so the texts are made here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from moejob_api.contract.pods import RunPhase, parse_phase
from moejob_api.job.status import DisplayTexts, Phase, Progress
from moejob_operator.planning.decision import Decision
from moejob_operator.planning.observed_state import ObservedState
from moejob_operator.planning.timestamps import parse_time, seconds_since

_PHASES = tuple(RunPhase)
_UNITS = ((86_400, "d"), (3_600, "h"), (60, "m"), (1, "s"))


# Shorter phases are not worth a write: a start of small models has eight of them in ten seconds.
SHOWN_PHASE_SECONDS = 10.0
# The word of each phase outside of steps, in the column of steps.
_PHASE_WORDS: Mapping[RunPhase, str] = MappingProxyType(
    {
        RunPhase.IMPORTING: "Importing",
        RunPhase.AWAITING_PODS: "Waiting for pods",
        RunPhase.JOINING: "Joining",
        RunPhase.READING_MODEL: "Reading model",
        RunPhase.PREPARING_DATA: "Preparing data",
        RunPhase.BUILDING: "Building model",
        RunPhase.RESTORING: "Loading",
        RunPhase.CHECKING: "Checking model",
        RunPhase.AWAITING_ENGINES: "Waiting for engines",
        RunPhase.FIRST_STEP: "First step",
        RunPhase.FINISHING: "Saving",
        RunPhase.EXPORTING: "Exporting",
    }
)


def build_display(s: ObservedState, decision: Decision, progress: Progress | None) -> DisplayTexts | None:
    """Return the texts. They change with the progress, and with the phase of ranks in a poll."""
    texts, words = _progress_texts(s, progress), _phase_words(s, decision)
    if words is None:
        return texts
    return (texts or DisplayTexts()).model_copy(update={"step": words or _reached_step(progress)})


def _phase_words(s: ObservedState, decision: Decision) -> str | None:
    """Return the phase of the rank that is furthest behind, such as `Loading 43 %`; empty where ranks make steps.

    None when no pod was heard in this reconcile and the gang still runs: then the texts stay.
    """
    if decision.phase is not Phase.RUNNING:
        has_phase = s.status.display is not None and s.status.display.step.startswith(tuple(_PHASE_WORDS.values()))
        return "" if has_phase else None
    reports = [s.observation.progress[pod.uid] for pod in s.trainers.values() if pod.uid in s.observation.progress]
    phases = [
        (_PHASES.index(phase), 100 if percentage is None else percentage, report.phase_seconds or 0.0)
        for report in reports
        if report.phase is not None
        for phase, percentage in filter(None, [parse_phase(report.phase)])
    ]
    if not phases:
        return None
    number, percentage, seconds = min(phases)
    phase = _PHASES[number]
    if phase is RunPhase.FIRST_STEP and not all(pod.is_ready for pod in s.rollouts):
        phase = RunPhase.AWAITING_ENGINES
    word = _PHASE_WORDS.get(phase, "")
    if not word:
        return ""
    return (word if percentage == 100 else f"{word} {percentage} %") if seconds >= SHOWN_PHASE_SECONDS else None


def _reached_step(progress: Progress | None) -> str:
    return "" if progress is None else step_text(progress)


def _progress_texts(s: ObservedState, progress: Progress | None) -> DisplayTexts | None:
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
