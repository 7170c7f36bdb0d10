"""What is told of a run while it trains: the step log, what sinks are sent, and the progress the launcher serves.

docs/trainer.md lists every number of a line.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moejob_api.contract import RunFile, RunProgress
from moejob_api.hardware import TERA, known
from moejob_api.job.resources import Accelerator, Resources
from moejob_trainer.beats import Beats
from moejob_trainer.checkpoints.disk import explained
from moejob_trainer.engine import UpdateResult
from moejob_trainer.fencing import Claim
from moejob_trainer.starting import Start
from moejob_trainer.tracking import Tracker

STEP_LOG = RunFile.STEPS.value


@dataclass(frozen=True, slots=True)
class Ranks:
    """What the work of a step is divided by. `peak_flops_per_second` is of one GPU, where the job says which."""

    count: int
    has_gpus: bool = False
    peak_flops_per_second: float | None = None


def ranks_of(resources: Resources, count: int) -> Ranks:
    """The ranks of a job. A peak is never guessed: a share of the wrong one would look like a measurement."""
    if resources.accelerator is Accelerator.CPU:
        return Ranks(count)
    gpu_type = resources.gpu_type
    return Ranks(count, True, None if gpu_type is None else known(gpu_type).bf16_flops_per_second)


@dataclass(frozen=True, slots=True)
class Teller:
    """Where a rank says what. Only the first rank writes; every rank beats."""

    folder: Path
    beats: Beats
    claim: Claim
    tracker: Tracker
    is_first: bool

    def wrote(self, step: int, line: Mapping[str, Any]) -> None:
        """Adds a line to the step log, whole or not at all: a reader never sees half of one. Tells the sinks."""
        if not self.is_first:
            return
        path = self.folder / STEP_LOG
        with explained("telling of a step", path), path.open("a", encoding="utf-8") as log:
            log.write(json.dumps({name: _finite(value) for name, value in line.items()}, allow_nan=False) + "\n")
        self.tracker.write(step, line)


@dataclass(slots=True)
class Reporter:
    """Tells of every step. `saved` and `epoch` are asked when there is something to tell."""

    teller: Teller
    total_steps: int
    ranks: Ranks
    saved: Callable[[], tuple[int | None, float | None, float]]
    epoch: Callable[[], float | None]
    waited: Callable[[], float]
    evaluate: Callable[[int], Mapping[str, float]]
    clock: Callable[[], float] = time.monotonic
    _since: float = field(init=False, default=0.0)
    _begun: float = field(init=False, default=0.0)
    _told: RunProgress | None = field(init=False, default=None)
    _start: Start | None = field(init=False, default=None)

    def begin(self, start: Start | None = None) -> None:
        """The first step begins now: what it took to get there is told beside it, and no part of it."""
        self._since, self._start = self.clock(), start
        self._begun = self._since

    def report(self, step: int, results: Sequence[UpdateResult]) -> None:
        """One step: its line, its beat, and an evaluation when one is due."""
        now = self.clock()
        seconds, self._since = now - self._since, now
        evaluated = self.evaluate(step)
        self.teller.beats.beat(step)
        speed = _speed(results, seconds, self.ranks)
        started, self._start = {} if self._start is None else self._start.told(), None
        told = {**_learned(results), **speed, **results[-1].metrics, **evaluated}
        line = {**self._progress(step, seconds), **started, **told}
        self.teller.wrote(step, line)
        if self.teller.is_first:
            self._say(self._run_progress(step, results[-1], speed, now - self._begun))
        # What evaluating took is no part of the next step.
        self._since = self.clock()

    def finish(self) -> None:
        """The last checkpoint is complete: what the launcher says last of the run names it."""
        step, save_seconds, _ = self.saved()
        if not self.teller.is_first or step is None:
            return
        # A run that has nothing left to do but its export has told of no step.
        told = self._told or RunProgress(step=step, total_steps=self.total_steps)
        # It may have saved nothing itself either, and then does not know how long that took.
        took = told.save_seconds if save_seconds is None else save_seconds
        self._say(told.model_copy(update={"last_checkpoint_step": step, "save_seconds": took}))

    def _say(self, run: RunProgress) -> None:
        self._told = run
        self.teller.beats.say(run)

    def _progress(self, step: int, seconds: float) -> dict[str, Any]:
        _, _, stalled = self.saved()
        return {
            "step": step,
            "epoch": self.epoch(),
            "seconds": round(seconds, 6),
            "time": round(time.time(), 3),
            "attempt": self.teller.claim.attempt,
            "restart": self.teller.claim.restart,
            "dataWaitSeconds": round(self.waited(), 6),
            "checkpointStallSeconds": round(stalled, 6),
        }

    def _run_progress(
        self, step: int, last: UpdateResult, speed: Mapping[str, float], stepping_seconds: float
    ) -> RunProgress:
        saved_step, save_seconds, _ = self.saved()
        return RunProgress(
            step=step,
            total_steps=self.total_steps,
            epoch=self.epoch(),
            # JSON has no word for what is not finite, and the contract takes none.
            loss=_finite(last.loss),
            mtp_loss=_finite(last.metrics.get("mtpLoss")),
            reward=_finite(last.metrics.get("reward")),
            learning_rate=last.learning_rate,
            gradient_norm=_finite(last.gradient_norm),
            tokens_per_second_per_gpu=speed.get("tokensPerSecondPerGpu"),
            mfu=speed.get("mfu"),
            last_checkpoint_step=saved_step,
            save_seconds=save_seconds,
            stepping_seconds=round(stepping_seconds, 3),
        )


def _learned(results: Sequence[UpdateResult]) -> dict[str, Any]:
    last = results[-1]
    return {
        "loss": last.loss,
        "gradNorm": last.gradient_norm,
        "learningRate": last.learning_rate,
        "tokens": sum(result.tokens for result in results),
        "applied": all(result.is_applied for result in results),
    }


def _speed(results: Sequence[UpdateResult], seconds: float, ranks: Ranks) -> dict[str, float]:
    """How fast the step was; a CPU has no peak to be measured against."""
    if not seconds:
        return {}
    tokens = sum(result.tokens for result in results) / seconds
    speed = {"tokensPerSecond": round(tokens, 3), "tokensPerSecondPerGpu": round(tokens / ranks.count, 3)}
    flops = sum(result.flops for result in results) / seconds / ranks.count
    if ranks.has_gpus:
        speed["tflopsPerGpu"] = round(flops / TERA, 3)
    if ranks.peak_flops_per_second is not None:
        speed["mfu"] = round(flops / ranks.peak_flops_per_second, 6)
    return speed


def _finite(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
