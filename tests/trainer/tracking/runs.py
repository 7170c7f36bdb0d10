"""Builders for the reports of a run, and tracker backends that misbehave in every way."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from builders import spec
from moejob_trainer.runtime.fencing import FenceToken
from moejob_trainer.tracking import TrackedRun
from moejob_trainer.tracking.backends import StepNumbers
from moejob_trainer.training import UpdateResult

DEADLINE_SECONDS = 300.0


def tracked(folder: Path, **tracking: Any) -> TrackedRun:
    """A run with this spec.tracking; `restart` says which start of its ranks it is."""
    token = FenceToken(1, tracking.pop("restart", 0))
    return TrackedRun("tiny", "uid-7", spec(tracking=tracking), folder, token)


def numbers(step: int, **values: float) -> StepNumbers:
    """Return the metrics of a step."""
    return StepNumbers(step, 1000.0 + step, values or {"loss": 1.0 / step})


def updated(loss: float = 2.5, **fields: Any) -> UpdateResult:
    """An update of 1,000 tokens."""
    return UpdateResult(loss=loss, **({"gradient_norm": 0.5, "learning_rate": 1e-4, "tokens": 1000} | fields))


class Kept:
    """A sink that keeps what it gets. `broken` steps are refused."""

    def __init__(self, broken: frozenset[int] = frozenset()) -> None:
        self.broken, self.steps, self.ended = broken, list[int](), list[bool]()

    def write(self, numbers: StepNumbers) -> None:
        if numbers.step in self.broken:
            raise ConnectionError(f"no route for step {numbers.step}")
        self.steps.append(numbers.step)

    def close(self, *, has_failed: bool) -> None:
        self.ended.append(has_failed)


class Hanging:
    """A sink that never comes back, until the test is over."""

    def __init__(self) -> None:
        self.is_reached, self.released = threading.Event(), threading.Event()

    def write(self, numbers: StepNumbers) -> None:  # noqa: ARG002
        self.is_reached.set()
        self.released.wait()

    def close(self, *, has_failed: bool) -> None:
        """Never asked before `write` has come back."""


def until(is_so: Callable[[], bool]) -> None:
    """Waits for another thread."""
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not is_so():
        assert time.monotonic() < deadline, "nothing happened"
        time.sleep(0.005)
