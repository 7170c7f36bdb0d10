"""How ranks agree: rank 0 decides, the others hear it, and a failure of one is a failure of all.

A collective that only some ranks reach hangs the run; so whatever can fail is caught, told to everyone, and raised on
every rank alike. What carries the words (torch.distributed) is passed in.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

from moejob_trainer.errors import BadConfiguration, Retryable, Superseded

T = TypeVar("T")

# In the order in which they matter when ranks failed differently.
_FORESEEN = (Superseded, BadConfiguration, Retryable)


class Ranks(Protocol):
    """All ranks of the run. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """This rank."""

    @property
    def size(self) -> int:
        """How many there are."""

    def gathered(self, value: T) -> Sequence[T]:
        """Every rank's value in rank order, at rank 0; nothing elsewhere."""

    def broadcast(self, value: T) -> T:
        """Rank 0's value, on every rank."""


@dataclass(frozen=True, slots=True)
class Alone:
    """The only rank of its run."""

    rank: int = 0
    size: int = 1

    def gathered(self, value: T) -> Sequence[T]:
        """The one value."""
        return [value]

    def broadcast(self, value: T) -> T:
        """The value."""
        return value


@dataclass(frozen=True, slots=True)
class Done(Generic[T]):
    """It worked, and this came of it."""

    value: T


@dataclass(frozen=True, slots=True)
class Failed:
    """It did not work, for a foreseen reason."""

    kind: type[Superseded | BadConfiguration | Retryable]
    message: str


def attempted(act: Callable[[], T]) -> Done[T] | Failed:
    """What came of it, foreseen failures as values."""
    try:
        return Done(act())
    except _FORESEEN as error:
        return Failed(type(error), str(error))


def everyone(ranks: Ranks, act: Callable[[], T]) -> list[T]:
    """Every rank acts; rank 0 gets all results in rank order, the others nothing. A failure is raised on all."""
    outcomes = ranks.gathered(attempted(act))
    _raise(ranks.broadcast(_worst(outcomes)))
    return [one.value for one in outcomes if isinstance(one, Done)]


def decided(ranks: Ranks, act: Callable[[], T]) -> T:
    """Rank 0 acts; all get its result, or all raise."""
    outcome: Done[T] | Failed | None = attempted(act) if ranks.rank == 0 else None
    outcome = ranks.broadcast(outcome)
    if isinstance(outcome, Done):
        return outcome.value
    _raise(outcome)
    raise AssertionError(f"rank {ranks.rank} heard nothing from rank 0")


def agreed(ranks: Ranks, claim: bool) -> bool:
    """Whether it holds on every rank."""
    return ranks.broadcast(all(ranks.gathered(claim)))


def _worst(outcomes: Sequence[Done[T] | Failed]) -> Failed | None:
    failures = [(rank, one) for rank, one in enumerate(outcomes) if isinstance(one, Failed)]
    if not failures:
        return None
    rank, worst = min(failures, key=lambda failure: _FORESEEN.index(failure[1].kind))
    return worst if len(outcomes) == 1 else replace(worst, message=f"rank {rank}: {worst.message}")


def _raise(failure: Failed | None) -> None:
    if failure is not None:
        raise failure.kind(failure.message)
