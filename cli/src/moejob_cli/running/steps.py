"""The step log of a run, read while it grows, and the curve that follows from it."""

from __future__ import annotations

from collections.abc import Sequence
from math import nan
from pathlib import Path
from statistics import median
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

_RECENT_STEPS = 20


class StepLine(BaseModel):
    """One line of steps.jsonl, as far as it is shown."""

    model_config = ConfigDict(frozen=True)

    step: int
    # Not a number where the log has none, for JSON has no word for it.
    loss: float = nan
    seconds: float = 0.0
    tokens: float = 0.0
    eval_loss: Annotated[float | None, Field(alias="evalLoss")] = None
    best_step: Annotated[int | None, Field(alias="bestStep")] = None
    best_score: Annotated[float | None, Field(alias="bestScore")] = None
    stopped_early: Annotated[bool, Field(alias="stoppedEarly")] = False
    # The mean reward of GRPO, shown instead of its loss, which stays near 0.
    reward: float | None = None
    groups: float = 0.0
    # Groups whose answers have equal rewards, and the share of answers without an end.
    flat_groups: Annotated[float, Field(alias="groupsWithoutSignal")] = 0.0
    cut_share: Annotated[float, Field(alias="truncated")] = 0.0

    @model_validator(mode="before")
    @classmethod
    def _without_nulls(cls, line: object) -> object:
        """Leave out nulls, so that a step with a number that is not finite is shown, too."""
        return {name: value for name, value in line.items() if value is not None} if isinstance(line, dict) else line


class StepLog:
    """Follows the file; `lines` are the run's steps in order, each in its newest version."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self.lines: list[StepLine] = []

    def read(self) -> None:
        """Read the complete lines that were added."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                added = file.read()
        except FileNotFoundError:
            return
        complete_lines = added[: added.rfind(b"\n") + 1]
        self._offset += len(complete_lines)
        for text in complete_lines.splitlines():
            self._add_line(text)

    def _add_line(self, text: bytes) -> None:
        try:
            line = StepLine.model_validate_json(text)
        except ValidationError:
            # The line was cut when the machine went down; the run does the step again.
            return
        # A resumed run does the steps behind its checkpoint again.
        while self.lines and self.lines[-1].step >= line.step:
            self.lines.pop()
        self.lines.append(line)


def tokens_per_second(lines: Sequence[StepLine]) -> float | None:
    """The speed of the last steps."""
    recent = lines[-_RECENT_STEPS:]
    seconds = sum(line.seconds for line in recent)
    return sum(line.tokens for line in recent) / seconds if seconds > 0 else None


def seconds_left(lines: Sequence[StepLine], total_steps: int | None) -> float | None:
    """Return the duration of the remaining steps at the pace of the last ones."""
    if not lines or total_steps is None:
        return None
    return median(line.seconds for line in lines[-_RECENT_STEPS:]) * max(0, total_steps - lines[-1].step)
