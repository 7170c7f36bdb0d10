"""What a place that numbers are sent to has to be able to do, and what it learns of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from moejob_api.job import Spec
from moejob_trainer.fencing import Claim


@dataclass(frozen=True, slots=True)
class TrackedRun:
    """The run as others know it."""

    job: str
    # The same in every attempt: what was sent before is gone on with.
    uid: str
    spec: Spec
    folder: Path
    claim: Claim


@dataclass(frozen=True, slots=True)
class Numbers:
    """What is told of one step. All values are finite."""

    step: int
    # Seconds since the epoch.
    time: float
    values: Mapping[str, float]


class Sink(Protocol):
    """A place that numbers are sent to. It may raise whatever it likes, and take as long as it likes."""

    def write(self, numbers: Numbers) -> None:
        """Sends the numbers of a step. After a restart, steps come a second time."""

    def close(self, *, has_failed: bool) -> None:
        """Sends what is left, and says how the run ended."""
