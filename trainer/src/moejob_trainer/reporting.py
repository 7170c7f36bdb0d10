"""What is told of a run while it trains: the step log, the progress the launcher serves, and evaluations on the way."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moejob_api.contract import RunFile, RunProgress
from moejob_trainer.beats import Beats
from moejob_trainer.checkpoints.disk import explained
from moejob_trainer.engine import UpdateResult
from moejob_trainer.fencing import Claim

STEP_LOG = RunFile.STEPS.value


@dataclass(frozen=True, slots=True)
class Teller:
    """Where a rank says what. Only the first rank writes; every rank beats."""

    folder: Path
    beats: Beats
    claim: Claim
    is_first: bool

    def wrote(self, line: Mapping[str, Any]) -> None:
        """Adds a line to the step log; whole or not at all, so that a reader never sees half of one."""
        if self.is_first:
            path = self.folder / STEP_LOG
            with explained("telling of a step", path), path.open("a", encoding="utf-8") as log:
                log.write(json.dumps(line) + "\n")


@dataclass(slots=True)
class Reporter:
    """Tells of every step. `saved` and `epoch` are asked when there is something to tell."""

    teller: Teller
    total_steps: int
    ranks: int
    saved: Callable[[], tuple[int | None, float | None, float]]
    epoch: Callable[[], float | None]
    waited: Callable[[], float]
    evaluate: Callable[[int], Mapping[str, float]]
    clock: Callable[[], float] = time.monotonic
    _since: float = field(init=False)

    def __post_init__(self) -> None:
        self._since = self.clock()

    def report(self, step: int, results: Sequence[UpdateResult]) -> None:
        """One step: its line, its beat, and an evaluation when one is due."""
        now = self.clock()
        seconds, self._since = now - self._since, now
        evaluated = self.evaluate(step)
        self.teller.beats.beat(step)
        last = results[-1]
        tokens = sum(result.tokens for result in results)
        saved_step, save_seconds, stalled = self.saved()
        self.teller.wrote(
            {
                "step": step,
                "loss": last.loss,
                "gradNorm": last.gradient_norm,
                "tokens": tokens,
                "seconds": round(seconds, 6),
                "time": round(time.time(), 3),
                "attempt": self.teller.claim.attempt,
                "restart": self.teller.claim.restart,
                "learningRate": last.learning_rate,
                "tokensPerSecond": round(tokens / seconds, 3) if seconds else None,
                "dataWaitSeconds": round(self.waited(), 6),
                "checkpointStallSeconds": round(stalled, 6),
                "epoch": self.epoch(),
                "applied": all(result.is_applied for result in results),
                **last.metrics,
                **evaluated,
            }
        )
        if self.teller.is_first:
            self.teller.beats.say(
                RunProgress(
                    step=step,
                    total_steps=self.total_steps,
                    epoch=self.epoch(),
                    loss=last.loss,
                    tokens_per_second_per_gpu=tokens / seconds / self.ranks if seconds else None,
                    last_checkpoint_step=saved_step,
                    save_seconds=save_seconds,
                )
            )
        # What evaluating took is no part of the next step.
        self._since = self.clock()
