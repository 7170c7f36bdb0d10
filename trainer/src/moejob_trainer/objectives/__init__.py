"""Training objectives: each says which batches to take and what their loss is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from moejob_trainer.distributed.encoding import Array
from moejob_trainer.training import LossTerms, MicroBatch, TokenOutputs, TrainingEngine


@dataclass(frozen=True, slots=True, eq=False)
class ObjectiveState:
    """The state of an objective at one moment, on rank 0; elsewhere it may be empty.

    Nothing may change an array afterwards: a save in the background writes it while training continues.
    """

    # Plain JSON.
    entries: Mapping[str, Any]
    # Too large for JSON. A checkpoint has a file for them only where there are any.
    arrays: Mapping[str, Array] = field(default_factory=dict)


class StoppedWaiting(Exception):
    """A wait that ends because the run is asked to stop. Every rank raises it, before any update of the step."""


class Objective(Protocol):
    """A training method. Every rank holds one and calls its methods in the same order."""

    def updates(self, step: int, engine: TrainingEngine) -> Iterable[Sequence[MicroBatch]]:
        """This data rank's micro batches of each update of a step. StoppedWaiting instead of a long wait for them."""

    def loss(self, outputs: TokenOutputs, batch: MicroBatch) -> LossTerms:
        """The weighted sum of a micro batch's losses."""

    def snapshot_state(self) -> ObjectiveState:
        """Return the state to resume from. Called once for a save, on rank 0 only."""

    def load_state(self, state: ObjectiveState) -> None:
        """Resume from that state. Rank 0 alone gets its arrays."""
