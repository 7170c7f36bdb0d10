"""The one training loop. Knows no method of learning, no layout and no cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from moejob_trainer.objectives import Objective, StoppedWaiting
from moejob_trainer.training import TrainingEngine, UpdateResult


class LoopOutcome(StrEnum):
    """The end of the loop."""

    COMPLETED = "Completed"
    PREEMPTED = "Preempted"


class Checkpoints(Protocol):
    """The state that survives the process."""

    def restore(self) -> int:
        """Resume from the newest good checkpoint; the steps done by then, 0 if there is none."""

    def poll(self) -> None:
        """Move a save that is under way on without waiting, and commit it once it is written. Every rank calls this."""

    def is_due(self, step: int) -> bool:
        """Return whether to save after this step; every rank gets the same answer."""

    def save(self, step: int) -> None:
        """Save everything needed to go on after this step."""


class Stop(Protocol):
    """A request to end the run."""

    def has_agreed(self) -> bool:
        """Return whether to end after this step. All ranks call it together and get the same answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """Everything a run is made of."""

    engine: TrainingEngine
    objective: Objective
    checkpoints: Checkpoints
    stop: Stop
    total_steps: int
    report: Callable[[int, Sequence[UpdateResult]], None]
    # Whether the step that was reported is to be saved for its evaluation; on every rank alike.
    is_among_best: Callable[[int], bool] = lambda _: False
    # Whether the run stops before its last step; on every rank alike.
    is_over: Callable[[], bool] = lambda: False
    # Called when the state is there and the first step begins.
    begin_stepping: Callable[[], None] = lambda: None
    # Surrounds the updates of a step, counted from 1.
    trace_step: Callable[[int], AbstractContextManager[None]] = lambda _: nullcontext()


def run_training_loop(run: TrainingRun) -> LoopOutcome:
    """Step until the run is done or asked to stop, and save the state by then."""
    step, is_owed = run.checkpoints.restore(), False
    saved_step = step
    run.begin_stepping()
    while step < run.total_steps and not run.is_over():
        try:
            results = _make_updates(run, step)
        except StoppedWaiting:
            # The state is still that after the step before.
            if saved_step < step:
                run.checkpoints.save(step)
            return LoopOutcome.PREEMPTED
        step += 1
        run.report(step, results)
        is_stopping, is_sound = run.stop.has_agreed(), all(result.is_applied for result in results)
        run.checkpoints.poll()
        is_owed = run.checkpoints.is_due(step) or is_owed
        is_last = step == run.total_steps or run.is_over()
        # The last step is saved too: an export that fails must not cost what was learned since. A model that diverges
        # would push every good checkpoint out of those that are kept.
        if is_stopping or is_last or run.is_among_best(step) or (is_owed and is_sound):
            run.checkpoints.save(step)
            saved_step, is_owed = step, False
        if is_stopping and not is_last:
            return LoopOutcome.PREEMPTED
    return LoopOutcome.COMPLETED


def _make_updates(run: TrainingRun, step: int) -> list[UpdateResult]:
    """Make the updates of a step; StoppedWaiting before the first of them where the run stops instead."""
    run.engine.begin_step(step)
    with run.trace_step(step + 1):
        return [run.engine.update(batches, run.objective.loss) for batches in run.objective.updates(step, run.engine)]
