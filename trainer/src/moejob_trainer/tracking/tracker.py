"""The tracker of a run: all backends that the job asks for, ended together."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import TracebackType
from typing import Any, Self

from moejob_trainer.tracking.backends import StepNumbers, TrackedRun, TrackerBackend
from moejob_trainer.tracking.background import BackgroundBackend
from moejob_trainer.tracking.mlflow_run import MLflowRun
from moejob_trainer.tracking.tensorboard_events import TensorBoardEvents
from moejob_trainer.tracking.trackio_inbox import TrackioInbox
from moejob_trainer.tracking.wandb_run import WandbRun

# For all backends together, at the end of the run.
PATIENCE_SECONDS = 5.0


class Tracker:
    """Sends the step log's metrics to every backend. Used in a `with`, whose end closes the backends.

    The end has to be explicit: functions registered with atexit do not run in ranks.
    """

    def __init__(self, backends: Sequence[BackgroundBackend], patience_seconds: float = PATIENCE_SECONDS) -> None:
        self._backends, self._patience_seconds = backends, patience_seconds

    def write(self, step: int, line: Mapping[str, Any]) -> None:
        """Send the numbers of a line."""
        if self._backends:
            numbers = StepNumbers(step, time.time(), _finite_numbers(line))
            for backend in self._backends:
                backend.write(numbers)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # A requested stop raises no Exception but a BaseException, and is no failure.
        has_failed = kind is not None and issubclass(kind, Exception)
        deadline = time.monotonic() + self._patience_seconds
        for backend in self._backends:
            backend.begin_close(has_failed=has_failed)
        for backend in self._backends:
            backend.wait(deadline)


def open_tracker(run: TrackedRun, *, is_first: bool) -> Tracker:
    """Open the backends that spec.tracking asks for; one rank sends for all."""
    if not is_first:
        return Tracker([])
    return Tracker([BackgroundBackend(name, open_backend) for name, open_backend in backend_openers(run).items()])


def backend_openers(run: TrackedRun) -> Mapping[str, Callable[[], TrackerBackend]]:
    """Return the opener of each backend of the job, by its field in the spec."""
    tracking = run.spec.tracking
    backends: dict[str, Callable[[], TrackerBackend]] = {}
    if tracking.tensorboard:
        backends["tracking.tensorboard"] = partial(TensorBoardEvents, run)
    if tracking.wandb is not None:
        backends["tracking.wandb"] = partial(WandbRun, run, tracking.wandb)
    if tracking.mlflow is not None:
        backends["tracking.mlflow"] = partial(MLflowRun, run, tracking.mlflow)
    if tracking.trackio is not None:
        backends["tracking.trackio"] = partial(TrackioInbox, run, tracking.trackio)
    return backends


# The axes, not the metrics plotted over them.
_AXES = ("step", "time")


def _finite_numbers(line: Mapping[str, Any]) -> Mapping[str, float]:
    return {
        name: float(value)
        for name, value in line.items()
        if name not in _AXES and isinstance(value, int | float) and math.isfinite(value)
    }
