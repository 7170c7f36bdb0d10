"""One answer as rewards see it, and the failures of a reward. Imported by workers: knows nothing of torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class FailureKind(StrEnum):
    """The kind of a failure in two words; logs count failures by kind."""

    IMPORT = "import failed"
    RECORD = "record has no reference"
    EXCEPTION = "exception"
    TIMEOUT = "time-out"
    WRONG_TYPE = "wrong type"
    WRONG_COUNT = "wrong count"
    NOT_FINITE = "not finite"
    DIED = "process died"
    KILLED = "process killed"
    UNREADABLE = "unreadable answer"
    ERROR = "service error"
    AWAY = "service away"
    REFUSED = "service refused"


# Failures that every answer would have: the run ends, whatever rewardFailure says.
FINAL_FAILURES = frozenset({FailureKind.IMPORT, FailureKind.REFUSED})
# Failures that may be gone at the next try, though nothing is changed.
PASSING_FAILURES = frozenset(
    {FailureKind.AWAY, FailureKind.ERROR, FailureKind.TIMEOUT, FailureKind.DIED, FailureKind.KILLED}
)
# Failures of a whole batch, which say nothing about a single completion.
BATCH_FAILURES = frozenset({*FINAL_FAILURES, FailureKind.AWAY})


class RewardFailed(RuntimeError):
    """A reward raised, took too long, or gave no number."""

    def __init__(self, kind: FailureKind, message: str) -> None:
        super().__init__(message)
        self.kind = kind


@dataclass(frozen=True, slots=True)
class Completion:
    """An answer to a prompt."""

    prompt: str
    text: str
    # Of the answer, its end included.
    tokens: int
    max_new_tokens: int
    # The other fields of the prompt's record, as JSON knows them.
    fields: Mapping[str, object] = field(default_factory=dict)
    # The prompt before its chat template; None where it was text.
    messages: Sequence[Mapping[str, Any]] | None = None
