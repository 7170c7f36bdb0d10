"""Reports of a run while it trains: the step log, the tracker backends, and the progress the launcher serves.

docs/trainer/metrics.md lists every number of a line.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from moejob_api.contract.pods import MOST_MEASURE_NAME, MOST_MEASURES, RunFile, RunProgress
from moejob_api.hardware import TERA, known
from moejob_api.job.resources import Accelerator, Resources
from moejob_api.job.status import HubCommit
from moejob_trainer.runtime.disk import Disk, cut_half_line, explained
from moejob_trainer.runtime.fencing import FenceToken
from moejob_trainer.runtime.heartbeats import Heartbeat
from moejob_trainer.runtime.start_timing import StartTiming
from moejob_trainer.tracking import Tracker
from moejob_trainer.training import UpdateResult

STEP_LOG = RunFile.STEPS.value


@dataclass(frozen=True, slots=True)
class RankHardware:
    """The divisors of a step's speed: ranks, and the peak of one GPU where the job names its type."""

    count: int
    has_gpus: bool = False
    peak_flops_per_second: float | None = None


def rank_hardware(resources: Resources, count: int) -> RankHardware:
    """Return the ranks of a job. A peak is never guessed: an MFU of a wrong peak would look like a measurement."""
    if resources.accelerator is Accelerator.CPU:
        return RankHardware(count)
    gpu_type = resources.gpu_type
    return RankHardware(count, True, None if gpu_type is None else known(gpu_type).bf16_flops_per_second)


@dataclass(frozen=True, slots=True)
class ProgressWriter:
    """Writer of the step log and of progress. Only the first rank writes; every rank sends heartbeats."""

    folder: Path
    heartbeat: Heartbeat
    token: FenceToken
    tracker: Tracker
    is_first: bool

    def mend_step_log(self) -> None:
        """Cut the half line that a full disk or a power cut has left: the next line would be joined to it."""
        if not self.is_first:
            return
        path = self.folder / STEP_LOG
        with explained("mending the step log", path):
            cut = cut_half_line(Disk(), path)
        if cut:
            sys.stderr.write(f"{path} ended in half a line: its last {len(cut)} bytes were cut\n")

    def write_step(self, step: int, line: Mapping[str, Any]) -> None:
        """Add a line to the step log, whole or not at all, and send its numbers to the tracker."""
        if not self.is_first:
            return
        path = self.folder / STEP_LOG
        with explained("writing the step log", path), path.open("a", encoding="utf-8") as lines:
            lines.write(json.dumps({name: _finite(value) for name, value in line.items()}, allow_nan=False) + "\n")
        self.tracker.write(step, line)


@dataclass(slots=True)
class Reporter:
    """Reports every step. The callables are read at each report."""

    writer: ProgressWriter
    total_steps: int
    ranks: RankHardware
    saved: Callable[[], tuple[int | None, float | None, float]]
    epoch: Callable[[], float | None]
    waited: Callable[[], float]
    evaluate: Callable[[int], Mapping[str, float]]
    # Metrics of the last step beside those of its updates.
    measured: Callable[[], Mapping[str, float]] = dict
    # Called with each line, on the first rank.
    note: Callable[[Mapping[str, Any]], None] = lambda _line: None
    # Called with a step and its updates before its line is written, so that a reported step has its record.
    record: Callable[[int, Sequence[UpdateResult]], None] = lambda *_: None
    hub_commits: tuple[HubCommit, ...] | None = None
    clock: Callable[[], float] = time.monotonic
    _since: float = field(init=False, default=0.0)
    _begun: float = field(init=False, default=0.0)
    _last_progress: RunProgress | None = field(init=False, default=None)
    _start: StartTiming | None = field(init=False, default=None)
    # Numbers that only some lines have; progress shows the newest of them.
    _lasting: dict[str, Any] = field(init=False, default_factory=dict)

    def begin(self, start: StartTiming | None = None, known: Mapping[str, float] | None = None) -> None:
        """Start the clock of the first step; the time before it is reported separately.

        Numbers of earlier evaluations are shown until there are newer ones.
        """
        self.writer.mend_step_log()
        self._since, self._start = self.clock(), start
        self._lasting |= known or {}
        self._begun = self._since

    def report(self, step: int, results: Sequence[UpdateResult]) -> None:
        """Report one step: its line, its heartbeat, and an evaluation when one is due."""
        now = self.clock()
        seconds, self._since = now - self._since, now
        self.record(step, results)
        means = means_of_updates(results)
        metrics = {**means, **self.measured()}
        evaluated = self._evaluated(step, now)
        self.writer.heartbeat.beat(step)
        speed = _speed(results, seconds, self.ranks)
        started, self._start = {} if self._start is None else self._start.as_fields(), None
        line = {**self._progress(step, seconds), **started, **_learned(results), **speed, **metrics, **evaluated}
        self.writer.write_step(step, line)
        if self.writer.is_first:
            self.note(line)
            self._lasting |= {**started, **evaluated}
            last = replace(results[-1], loss=means["loss"], metrics=metrics)
            progress = self._run_progress(step, last, speed, now - self._begun)
            self._publish(progress.model_copy(update={"measures": _measures({**self._lasting, **line})}))
        # The time of an evaluation belongs to no step.
        self._since = self.clock()

    def finish(self, stopped_at: int | None = None) -> None:
        """Report the last progress, once the last checkpoint is complete.

        A run that stopped early reports the steps done as its total, so its bar is full and no time is left.
        """
        step, save_seconds, _ = self.saved()
        if not self.writer.is_first or step is None:
            return
        # A run that only had to export has reported no step.
        last = self._last_progress or RunProgress(
            step=step,
            total_steps=self.total_steps,
            measures=_measures(self._lasting),
            hub_commits=self.hub_commits,
        )
        # A run that has saved nothing itself does not know how long a save took.
        took = last.save_seconds if save_seconds is None else save_seconds
        total = self.total_steps if stopped_at is None else stopped_at
        known = {"total_steps": total, "last_checkpoint_step": step, "save_seconds": took}
        self._publish(last.model_copy(update=known))

    def _evaluated(self, step: int, begun: float) -> Mapping[str, float]:
        found = self.evaluate(step)
        return {**found, "evaluateSeconds": round(self.clock() - begun, 6)} if found else found

    def _publish(self, run: RunProgress) -> None:
        self._last_progress = run
        self.writer.heartbeat.report(run)

    def _progress(self, step: int, seconds: float) -> dict[str, Any]:
        _, _, stalled = self.saved()
        return {
            "step": step,
            "epoch": self.epoch(),
            "seconds": round(seconds, 6),
            "time": round(time.time(), 3),
            "attempt": self.writer.token.attempt,
            "restart": self.writer.token.restart,
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
            hub_commits=self.hub_commits,
        )


def means_of_updates(results: Sequence[UpdateResult]) -> dict[str, float]:
    """Return the loss and metrics of a step: weighted means over its updates; without a weight, the last update's.

    Two updates on 1 and 3 tokens with entropies 2.0 and 1.0 have (1 x 2.0 + 3 x 1.0) / 4 = 1.25.
    """
    numbers = [{"loss": one.loss, **one.metrics} for one in results]
    found = numbers[-1]
    for name in {name for one in results for name in one.weights}:
        pairs = [(of[name], one.weights[name]) for of, one in zip(numbers, results, strict=True) if name in one.weights]
        found = {**found, name: sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)}
    return found


# Numbers that have fields of their own in RunProgress, and the coordinates of a line.
_NAMED = frozenset(
    ("step", "epoch", "loss", "mtpLoss", "reward", "gradNorm", "learningRate", "tokensPerSecondPerGpu", "mfu")
) | {"time", "attempt", "restart", "applied"}
# The contract takes no larger number.
_LARGEST = 1e39


def _measures(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the other numbers of a line, as many as the contract takes."""
    fitting = [
        (name, float(value))
        for name, value in line.items()
        if name not in _NAMED and len(name) <= MOST_MEASURE_NAME and isinstance(value, int | float)
    ]
    return dict([(name, value) for name, value in fitting if abs(value) <= _LARGEST][:MOST_MEASURES])


def _learned(results: Sequence[UpdateResult]) -> dict[str, Any]:
    last = results[-1]
    return {
        "gradNorm": last.gradient_norm,
        "learningRate": last.learning_rate,
        "tokens": sum(result.tokens for result in results),
        "applied": all(result.is_applied for result in results),
    }


def _speed(results: Sequence[UpdateResult], seconds: float, ranks: RankHardware) -> dict[str, float]:
    """Return the speed of the step; a CPU has no peak to compare it with."""
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
