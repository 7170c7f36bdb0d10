"""All sinks of a run: which the job asks for, and how they end together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from moejob_trainer.tracking.background import Background
from moejob_trainer.tracking.mlflow_run import MLflowRun
from moejob_trainer.tracking.sinks import Numbers, Sink, TrackedRun
from moejob_trainer.tracking.tensorboard_events import TensorBoardEvents
from moejob_trainer.tracking.wandb_run import WandbRun

# For all sinks together, at the end of the run.
PATIENCE_SECONDS = 5.0


class Tracker:
    """Sends what the step log says to every sink. Used in a `with`, whose end the sinks are told of.

    Explicitly, for what is registered with atexit does not run in ranks.
    """

    def __init__(self, sinks: Sequence[Background], patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._sinks, self._patience_seconds = sinks, patience_seconds

    def write(self, step: int, line: Mapping[str, Any]) -> None:
        """Sends the numbers among what a line says."""
        if self._sinks:
            numbers = Numbers(step, time.time(), _numbers(line))
            for sink in self._sinks:
                sink.write(numbers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # Being asked to stop is no failure.
        has_failed = kind is not None and issubclass(kind, Exception)
        deadline = time.monotonic() + self._patience_seconds
        for sink in self._sinks:
            sink.begin_close(has_failed=has_failed)
        for sink in self._sinks:
            sink.wait(deadline)


def tracker(run: TrackedRun, *, is_first: bool) -> Tracker:
    """The sinks that spec.tracking asks for; one rank sends for all."""
    if not is_first:
        return Tracker([])
    return Tracker([Background(name, opened) for name, opened in asked_for(run).items()])


def asked_for(run: TrackedRun) -> Mapping[str, Callable[[], Sink]]:
    """What opens each sink of the job, by its field in the spec."""
    tracking = run.spec.tracking
    sinks: dict[str, Callable[[], Sink]] = {}
    if tracking.tensorboard:
        sinks["tracking.tensorboard"] = partial(TensorBoardEvents, run)
    if tracking.wandb is not None:
        sinks["tracking.wandb"] = partial(WandbRun, run, tracking.wandb)
    if tracking.mlflow is not None:
        sinks["tracking.mlflow"] = partial(MLflowRun, run, tracking.mlflow)
    return sinks


# The axes, not what is drawn over them.
_AXES = ("step", "time")


def _numbers(line: Mapping[str, Any]) -> Mapping[str, float]:
    return {
        name: float(value)
        for name, value in line.items()
        if name not in _AXES and isinstance(value, int | float) and math.isfinite(value)
    }
