"""The progress of the run, as pod 0 reports it; written seldom, as every write goes through etcd to all watchers.

Rank 0 writes its numbers beside its heartbeat, the launcher of pod 0 serves them at /progress, and reconcile.py asks
running pods for them as planning/polling.py says.
"""

from __future__ import annotations

from moejob_api.contract.pods import RunProgress, StatusMeasure
from moejob_api.job.base import MAX_COUNT
from moejob_api.job.status import Phase, Progress
from moejob_operator.planning.decision import Decision
from moejob_operator.planning.observed_state import ObservedState
from moejob_operator.planning.timestamps import format_time, parse_time, seconds_since

REPORT_SECONDS = 30.0


def progress_to_write(s: ObservedState, decision: Decision) -> Progress | None:
    """Return the progress to write: new numbers when they are due or a checkpoint is new, else those of before."""
    before = s.status.progress
    report = s.run_progress
    if report is None:
        return before
    now = _build_progress(report, format_time(s.now))
    if now.hub_commits is None and before is not None:
        # A termination message has no room for a long list of commits.
        now = now.model_copy(update={"hub_commits": before.hub_commits})
    if before is None or now.last_checkpoint_step != before.last_checkpoint_step:
        return now
    if now.model_copy(update={"updated_at": before.updated_at}) == before:
        return before
    is_due = seconds_since(parse_time(before.updated_at), s.now) >= REPORT_SECONDS
    return now if is_due or decision.phase is Phase.SUCCEEDED else before


def _build_progress(report: RunProgress, updated_at: str) -> Progress:
    return Progress(
        step=report.step,
        total_steps=report.total_steps,
        epoch=report.epoch,
        loss=report.loss,
        reward=report.reward,
        eval_loss=report.measures.get(StatusMeasure.EVAL_LOSS),
        eval_score=report.measures.get(StatusMeasure.EVAL_SCORE),
        best_score=report.measures.get(StatusMeasure.BEST_SCORE),
        best_step=_step_number(report.measures.get(StatusMeasure.BEST_STEP)),
        tokens_per_second_per_gpu=report.tokens_per_second_per_gpu,
        mfu=report.mfu,
        last_checkpoint_step=report.last_checkpoint_step,
        save_seconds=report.save_seconds,
        hub_commits=report.hub_commits,
        updated_at=updated_at,
    )


def _step_number(number: float | None) -> int | None:
    """Return a measure as a step; None for a number that is no step."""
    return int(number) if number is not None and 0 <= number <= MAX_COUNT else None
