"""The one training loop. Knows no method of learning, no layout and no cluster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from moejob_trainer.engine import Engine, UpdateResult
from moejob_trainer.objectives import Objective


class Outcome(StrEnum):
    """How the loop ended."""

    COMPLETED = "Completed"
    PREEMPTED = "Preempted"


class Checkpoints(Protocol):
    """What survives the process."""

    def restore(self) -> int:
        """Goes on from the newest good checkpoint; the steps done by then, 0 if there is none."""

    def is_due(self, step: int) -> bool:
        """Whether to save after this step; every rank gets the same answer."""

    def save(self, step: int) -> None:
        """Saves everything needed to go on after this step."""


class Stop(Protocol):
    """Somebody may ask the run to end."""

    def agreed(self) -> bool:
        """Whether to end after this step. All ranks call it together and get the same answer."""


@dataclass(frozen=True, slots=True)
class Run:
    """Everything a run is made of."""

    engine: Engine
    objective: Objective
    checkpoints: Checkpoints
    stop: Stop
    total_steps: int
    report: Callable[[int, Sequence[UpdateResult]], None]
    # Called when the state is there and the first step begins.
    begin: Callable[[], None] = lambda: None


def train(run: Run) -> Outcome:
    """Steps until the run is done or asked to stop; what was learned by then is saved."""
    step, is_owed = run.checkpoints.restore(), False
    run.begin()
    while step < run.total_steps:
        results = [
            run.engine.update(batches, run.objective.loss) for batches in run.objective.updates(step, run.engine)
        ]
        step += 1
        run.report(step, results)
        is_stopping, is_sound = run.stop.agreed(), all(result.is_applied for result in results)
        is_owed = run.checkpoints.is_due(step) or is_owed
        # The last step is saved too: an export that fails must not cost what was learned since. A model that diverges
        # would push every good checkpoint out of those that are kept.
        if is_stopping or step == run.total_steps or (is_owed and is_sound):
            run.checkpoints.save(step)
            is_owed = False
        if is_stopping and step < run.total_steps:
            return Outcome.PREEMPTED
    return Outcome.COMPLETED
