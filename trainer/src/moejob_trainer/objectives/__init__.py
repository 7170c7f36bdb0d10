"""Training objectives: each says which batches to take and what their loss is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from moejob_trainer.training import LossTerms, MicroBatch, TokenOutputs, TrainingEngine


class Objective(Protocol):
    """A training method. Every rank holds one and calls its methods in the same order."""

    def updates(self, step: int, engine: TrainingEngine) -> Iterable[Sequence[MicroBatch]]:
        """This data rank's micro batches of each update of a step."""

    def loss(self, outputs: TokenOutputs, batch: MicroBatch) -> LossTerms:
        """The weighted sum of a micro batch's losses."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state to resume from: plain JSON."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from that state."""
