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
from moejob_api.hardware import TERA, gpu_hardware
from moejob_api.job.resources import Accelerator, Resources
from moejob_api.job.status import HubCommit
from moejob_api.router_health import health_measures
from moejob_trainer.runtime.disk import Disk, cut_half_line, explain_failure
from moejob_trainer.runtime.fencing import FenceToken
from moejob_trainer.runtime.heartbeats import Heartbeat
from moejob_trainer.runtime.start_timing import StartTiming
from moejob_trainer.tracking import Tracker
from moejob_trainer.tracking.expert_log import append_expert_counts, is_recorded_step, mend_expert_log
from moejob_trainer.tracking.router_watch import RouterWatch
from moejob_trainer.tracking.signal_log import RouterLog
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
    return RankHardware(count, True, None if gpu_type is None else gpu_hardware(gpu_type).bf16_flops_per_second)


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
        mend_expert_log(self.folder)
        path = self.folder / STEP_LOG
        with explain_failure("mending the step log", path):
            cut = cut_half_line(Disk(), path)
        if cut:
            sys.stderr.write(f"{path} ended in half a line: its last {len(cut)} bytes were cut\n")

    def write_experts(self, step: int, result: UpdateResult) -> None:
        """Add the load of experts to its log, in the steps that are recorded."""
        if self.is_first and result.expert_counts is not None and is_recorded_step(step):
            append_expert_counts(self.folder, step, self.token, result.expert_counts)

    def write_step(self, step: int, line: Mapping[str, Any]) -> None:
        """Add a line to the step log, whole or not at all, and send its numbers to the tracker."""
        if not self.is_first:
            return
        path = self.folder / STEP_LOG
        with explain_failure("writing the step log", path), path.open("a", encoding="utf-8") as lines:
            lines.write(
                json.dumps({name: _finite_or_none(value) for name, value in line.items()}, allow_nan=False) + "\n"
            )
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
    # Called with each line, on the first rank; returns what the status of a job shows of it.
    note: Callable[[Mapping[str, Any]], Mapping[str, float]] = lambda _line: {}
    # Called with a step and its updates before its line is written, so that a reported step has its record.
    record: Callable[[int, Sequence[UpdateResult]], None] = lambda *_: None
    hub_commits: tuple[HubCommit, ...] | None = None
    clock: Callable[[], float] = time.monotonic
    _step_began_at: float = field(init=False, default=0.0)
    _began_at: float = field(init=False, default=0.0)
    _last_progress: RunProgress | None = field(init=False, default=None)
    _start: StartTiming | None = field(init=False, default=None)
    # Numbers that only some lines have; progress shows the newest of them.
    _lasting: dict[str, Any] = field(init=False, default_factory=dict)
    _routers: RouterWatch = field(init=False, default_factory=RouterWatch)
    _router_log: RouterLog = field(init=False, default_factory=RouterLog)

    def start(self, start: StartTiming | None = None, earlier_metrics: Mapping[str, float] | None = None) -> None:
        """Start the clock of the first step; the time before it is reported separately.

        Numbers of earlier evaluations are shown until there are newer ones.
        """
        self.writer.mend_step_log()
        self._step_began_at, self._start = self.clock(), start
        self._lasting |= earlier_metrics or {}
        self._began_at = self._step_began_at

    def report_step(self, step: int, results: Sequence[UpdateResult]) -> None:
        """Report one step: its line, its heartbeat, and an evaluation when one is due."""
        now = self.clock()
        seconds, self._step_began_at = now - self._step_began_at, now
        self.record(step, results)
        self.writer.write_experts(step, results[-1])
        means = means_of_updates(results)
        metrics = {**means, **self.measured()}
        evaluated = self._evaluate_step(step, now)
        self.writer.heartbeat.beat(step)
        speed = _speed_fields(results, seconds, self.ranks)
        start_fields, self._start = {} if self._start is None else self._start.as_fields(), None
        line = {
            **self._progress_fields(step, seconds),
            **start_fields,
            **_update_fields(results),
            **speed,
            **metrics,
            **evaluated,
        }
        self.writer.write_step(step, line)
        if self.writer.is_first:
            noted = self.note(line)
            self._note_routers(step, results[-1])
            self._lasting |= {**start_fields, **evaluated}
            last_result = replace(results[-1], loss=means["loss"], metrics=metrics)
            progress = self._build_run_progress(step, last_result, speed, now - self._began_at)
            # What a status needs comes first: a report has room for some measures only.
            measures = {**health_measures(self._routers.collapsed_layers), **noted, **self._lasting, **line}
            self._report_progress(progress.model_copy(update={"measures": _status_measures(measures)}))
        # The time of an evaluation belongs to no step.
        self._step_began_at = self.clock()

    def report_end(self, stopped_at: int | None = None) -> None:
        """Report the last progress, once the last checkpoint is complete.

        A run that stopped early reports the steps done as its total, so its bar is full and no time is left.
        """
        step, save_seconds, _ = self.saved()
        if not self.writer.is_first or step is None:
            return
        # A run that only had to export has reported no step.
        last_progress = self._last_progress or RunProgress(
            step=step,
            total_steps=self.total_steps,
            measures=_status_measures(self._lasting),
            hub_commits=self.hub_commits,
        )
        # A run that has saved nothing itself does not know how long a save took.
        last_save_seconds = last_progress.save_seconds if save_seconds is None else save_seconds
        total_steps = self.total_steps if stopped_at is None else stopped_at
        final_fields = {"total_steps": total_steps, "last_checkpoint_step": step, "save_seconds": last_save_seconds}
        self._report_progress(last_progress.model_copy(update=final_fields))

    def _note_routers(self, step: int, result: UpdateResult) -> None:
        if result.expert_counts is not None:
            self._routers.note_step(result.expert_counts)
            self._router_log.note_layers(step, self._routers.collapsed_layers)

    def _evaluate_step(self, step: int, began_at: float) -> Mapping[str, float]:
        metrics = self.evaluate(step)
        return {**metrics, "evaluateSeconds": round(self.clock() - began_at, 6)} if metrics else metrics

    def _report_progress(self, run: RunProgress) -> None:
        self._last_progress = run
        self.writer.heartbeat.report_run(run)

    def _progress_fields(self, step: int, seconds: float) -> dict[str, Any]:
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

    def _build_run_progress(
        self, step: int, last: UpdateResult, speed: Mapping[str, float], stepping_seconds: float
    ) -> RunProgress:
        saved_step, save_seconds, _ = self.saved()
        return RunProgress(
            step=step,
            total_steps=self.total_steps,
            epoch=self.epoch(),
            # JSON has no word for what is not finite, and the contract takes none.
            loss=_finite_or_none(last.loss),
            mtp_loss=_finite_or_none(last.metrics.get("mtpLoss")),
            reward=_finite_or_none(last.metrics.get("reward")),
            learning_rate=last.learning_rate,
            gradient_norm=_finite_or_none(last.gradient_norm),
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
    numbers = [{"loss": result.loss, **result.metrics} for result in results]
    means = numbers[-1]
    for name in {name for result in results for name in result.weights}:
        pairs = [
            (update_numbers[name], result.weights[name])
            for update_numbers, result in zip(numbers, results, strict=True)
            if name in result.weights
        ]
        means = {**means, name: sum(value * weight for value, weight in pairs) / sum(weight for _, weight in pairs)}
    return means


# Numbers that have fields of their own in RunProgress, and the coordinates of a line.
_NAMED_FIELDS = frozenset(
    ("step", "epoch", "loss", "mtpLoss", "reward", "gradNorm", "learningRate", "tokensPerSecondPerGpu", "mfu")
) | {"time", "attempt", "restart", "applied"}
# The contract takes no larger number.
_LARGEST_MEASURE = 1e39


def _status_measures(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the other numbers of a line, as many as the contract takes."""
    fitting = [
        (name, float(value))
        for name, value in line.items()
        if name not in _NAMED_FIELDS and len(name) <= MOST_MEASURE_NAME and isinstance(value, int | float)
    ]
    return dict([(name, value) for name, value in fitting if abs(value) <= _LARGEST_MEASURE][:MOST_MEASURES])


def _update_fields(results: Sequence[UpdateResult]) -> dict[str, Any]:
    last = results[-1]
    return {
        "gradNorm": last.gradient_norm,
        "learningRate": last.learning_rate,
        "tokens": sum(result.tokens for result in results),
        "applied": all(result.is_applied for result in results),
    }


def _speed_fields(results: Sequence[UpdateResult], seconds: float, ranks: RankHardware) -> dict[str, float]:
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


def _finite_or_none(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
