"""Decisions that all ranks share: rank 0 decides, the others receive it, a failure of one is a failure of all.

A collective that only some ranks reach hangs the run; so each rank catches its failures, sends them to all, and every
rank raises the same one. The transport (torch.distributed) is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, TypeVar

from pydantic import TypeAdapter

from moejob_trainer.distributed.encoding import BOOLEAN, decode_message, encode_message
from moejob_trainer.errors import BadConfiguration, Superseded, TransientFailure

T = TypeVar("T")

ErrorName = Literal["Superseded", "BadConfiguration", "TransientFailure"]

# When ranks fail differently, the run reports the first of these.
_FORESEEN: Mapping[ErrorName, type[Exception]] = {
    "Superseded": Superseded,
    "BadConfiguration": BadConfiguration,
    "TransientFailure": TransientFailure,
}


class Coordinator(Protocol):
    """All ranks of the run. Every rank makes the same calls in the same order; `kind` is the type of a value."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def gather(self, value: T, kind: TypeAdapter[T]) -> Sequence[T]:
        """Every rank's value in rank order, at rank 0; nothing elsewhere."""

    def broadcast(self, value: T | None, kind: TypeAdapter[T]) -> T:
        """Rank 0's value, on every rank."""


@dataclass(frozen=True, slots=True)
class SingleRank:
    """The only rank of its run."""

    rank: int = 0
    size: int = 1

    def gather(self, value: T, kind: TypeAdapter[T]) -> Sequence[T]:
        """The one value."""
        return [decode_message(encode_message(value, kind), kind)]

    def broadcast(self, value: T | None, kind: TypeAdapter[T]) -> T:
        """The value."""
        return decode_message(encode_message(value, kind), kind)


@dataclass(frozen=True, slots=True)
class ActionResult:
    """The result of an action that succeeded, as JSON."""

    content: str


@dataclass(frozen=True, slots=True)
class ActionFailure:
    """The foreseen error of an action that failed."""

    error: ErrorName
    message: str


_OUTCOME: TypeAdapter[ActionResult | ActionFailure] = TypeAdapter(ActionResult | ActionFailure)
_FAILURE: TypeAdapter[ActionFailure | None] = TypeAdapter(ActionFailure | None)


def capture_outcome(action: Callable[[], T], kind: TypeAdapter[T]) -> ActionResult | ActionFailure:
    """Return the result of an action, foreseen failures as values."""
    try:
        return ActionResult(encode_message(action(), kind).decode())
    except (Superseded, BadConfiguration, TransientFailure) as error:
        return ActionFailure(_error_name(error), str(error))


def run_on_all_ranks(ranks: Coordinator, action: Callable[[], T], kind: TypeAdapter[T]) -> list[T]:
    """Act on every rank; rank 0 gets all results in rank order, the others nothing. A failure is raised on all."""
    outcomes = ranks.gather(capture_outcome(action, kind), _OUTCOME)
    _raise_failure(ranks.broadcast(_worst_failure(outcomes), _FAILURE))
    return [decode_message(outcome.content.encode(), kind) for outcome in outcomes if isinstance(outcome, ActionResult)]


def run_on_first_rank(ranks: Coordinator, action: Callable[[], T], kind: TypeAdapter[T]) -> T:
    """Act on rank 0; all ranks get its result, or all raise."""
    outcome = ranks.broadcast(capture_outcome(action, kind) if ranks.rank == 0 else None, _OUTCOME)
    if isinstance(outcome, ActionFailure):
        raise _FORESEEN[outcome.error](outcome.message)
    return decode_message(outcome.content.encode(), kind)


def is_true_everywhere(ranks: Coordinator, condition: bool) -> bool:
    """Return whether this is true on every rank."""
    conditions = ranks.gather(condition, BOOLEAN)
    return ranks.broadcast(all(conditions), BOOLEAN)


def _error_name(error: Exception) -> ErrorName:
    return next(name for name, kind in _FORESEEN.items() if isinstance(error, kind))


def _worst_failure(outcomes: Sequence[ActionResult | ActionFailure]) -> ActionFailure | None:
    failures = [(rank, outcome) for rank, outcome in enumerate(outcomes) if isinstance(outcome, ActionFailure)]
    if not failures:
        return None
    rank, worst = min(failures, key=lambda failure: [*_FORESEEN].index(failure[1].error))
    return worst if len(outcomes) == 1 else replace(worst, message=f"rank {rank}: {worst.message}")


def _raise_failure(failure: ActionFailure | None) -> None:
    if failure is not None:
        raise _FORESEEN[failure.error](failure.message)
