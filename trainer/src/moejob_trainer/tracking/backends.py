"""The interface of a tracker backend, and the facts of the run that it receives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from moejob_api.job import Spec
from moejob_trainer.runtime.fencing import FenceToken


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The facts of a run that trackers receive."""

    job: str
    # The same in every attempt, so each attempt resumes the tracker's run.
    uid: str
    spec: Spec
    folder: Path
    token: FenceToken


@dataclass(frozen=True, slots=True)
class StepNumbers:
    """The metrics of one step. All values are finite."""

    step: int
    # Seconds since the epoch.
    time: float
    values: Mapping[str, float]


class TrackerBackend(Protocol):
    """A receiver of numbers. It may raise any exception and take any time: neither reaches the training loop."""

    def write(self, numbers: StepNumbers) -> None:
        """Send the numbers of a step. After a restart, steps come a second time."""

    def close(self, *, has_failed: bool) -> None:
        """Send the rest, and report the end of the run."""
