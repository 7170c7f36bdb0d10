"""Supervised fine-tuning: the labels are the next tokens of the data."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol

from moejob_trainer.objectives import ObjectiveState
from moejob_trainer.objectives.losses import cross_entropy
from moejob_trainer.training import LossTerms, MicroBatch, TokenOutputs, TrainingEngine, WeightedMean


class BatchSource(Protocol):
    """Global batches in a fixed order; each rank takes its own micro batches of them."""

    def next_batches(self) -> Sequence[MicroBatch]:
        """This data rank's micro batches of the next global batch."""

    def state_dict(self) -> Mapping[str, Any]:
        """Return the position in the data."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue behind that position."""


class SupervisedFineTuning:
    """One update a step, on the next global batch."""

    def __init__(self, source: BatchSource) -> None:
        self._source = source

    def updates(self, step: int, engine: TrainingEngine) -> Iterable[Sequence[MicroBatch]]:  # noqa: ARG002
        """Yield the next global batch: neither the step nor the model's outputs change it."""
        yield self._source.next_batches()

    def loss(self, outputs: TokenOutputs, batch: MicroBatch) -> LossTerms:
        """Cross-entropy of the tokens that carry weight, and the model's uncertainty about them."""
        weight = batch.weights.sum()
        return LossTerms(
            total=cross_entropy(outputs.log_probabilities, batch.weights),
            metrics={"entropy": WeightedMean((outputs.entropy * batch.weights).sum(), weight)},
        )

    def snapshot_state(self) -> ObjectiveState:
        """Return the source's position: there is no other state."""
        return ObjectiveState(self._source.state_dict())

    def load_state(self, state: ObjectiveState) -> None:
        """Resume with the sample behind the last trained one."""
        self._source.load_state_dict(state.entries)
