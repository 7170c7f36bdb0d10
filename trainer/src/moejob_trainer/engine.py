"""What the loop and the objectives know of training: batches go in, log-probabilities and updates come out.

Knows nothing of Megatron, of layouts or of what a loss means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from torch import Tensor

from moejob_trainer.batches import MicroBatch


@dataclass(frozen=True, slots=True, eq=False)
class TokenOutputs:
    """What the model says about the labels of a micro batch: whole documents, whatever the layout. float32 [T]

    further: log-probabilities of the first, second... token behind the label, where modules learn to predict them.
    """

    log_probabilities: Tensor
    entropy: Tensor
    further: tuple[Tensor, ...] = ()


@dataclass(frozen=True, slots=True)
class Mean:
    """A number that many ranks and micro batches contribute to."""

    total: Tensor | float
    weight: Tensor | float


@dataclass(frozen=True, slots=True, eq=False)
class LossTerms:
    """The loss of one micro batch as a weighted sum; the engine divides it by the weight of the global batch."""

    total: Tensor
    metrics: Mapping[str, Mean] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class UpdateResult:
    """One update of the weights, or why there was none."""

    loss: float
    gradient_norm: float
    learning_rate: float
    # Tokens that went through the model, padding left out.
    tokens: int
    # The model's own arithmetic for them in both passes: nothing that is computed again, nothing for padding.
    flops: float = 0.0
    metrics: Mapping[str, float] = field(default_factory=dict)
    # False when the gradient was not finite: the weights stayed as they were.
    is_applied: bool = True


Loss = Callable[[TokenOutputs, MicroBatch], LossTerms]


class Engine(Protocol):
    """A model spread over ranks. Every rank calls the same methods in the same order."""

    def update(self, batches: Sequence[MicroBatch], loss: Loss) -> UpdateResult:
        """One update of the weights from this data rank's micro batches of a global batch."""

    def evaluated(self, batches: Sequence[MicroBatch], loss: Loss) -> UpdateResult:
        """The loss without an update."""

    def outputs(self, batches: Sequence[MicroBatch]) -> list[TokenOutputs]:
        """What the model says now about each micro batch; every rank of a data rank gets all of it."""

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """The weights under their Hugging Face names, one at a time, each on one rank; all run it to its end."""
