"""The training engine's interface: batches go in, log-probabilities and updates come out.

Knows nothing of Megatron, of layouts or of what a loss means.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from moejob_trainer.training.micro_batch import MicroBatch


@dataclass(frozen=True, slots=True, eq=False)
class TokenOutputs:
    """The model's outputs for the labels of a micro batch: whole documents in every layout. float32 [T]

    likeliest: instead, the likeliest token behind each one that was asked for, else -1. int64 [T]

    mtp: log-probabilities of the first, second... token behind the label, where modules learn to predict them.
    """

    log_probabilities: Tensor
    entropy: Tensor
    mtp: tuple[Tensor, ...] = ()
    likeliest: Tensor | None = None


@dataclass(frozen=True, slots=True)
class WeightedMean:
    """A number that many ranks and micro batches contribute to."""

    total: Tensor | float
    weight: Tensor | float


@dataclass(frozen=True, slots=True, eq=False)
class LossTerms:
    """The loss of one micro batch as a weighted sum; the engine divides it by the weight of the global batch."""

    total: Tensor
    metrics: Mapping[str, WeightedMean] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class ExpertCounts:
    """The choices of every expert of every layer in one update, over all ranks.

    choices: those of a layer add up to its tokens times the experts of a token. [layers, E]

    disagreement: the share of choices replayed from engines that the router would not have made. [layers]
    """

    # Numbers of the layers with experts; MTP modules come behind the last layer.
    layers: tuple[int, ...]
    choices: NDArray[np.int64]
    per_token: int
    disagreement: NDArray[np.float64] | None = None


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
    # Of the loss and of each metric that is a mean: what it counts beside those of a step's other updates.
    weights: Mapping[str, float] = field(default_factory=dict)
    # False when the gradient was not finite: the weights stayed as they were.
    is_applied: bool = True
    expert_counts: ExpertCounts | None = field(default=None, compare=False)


LossFunction = Callable[[TokenOutputs, MicroBatch], LossTerms]


class TrainingEngine(Protocol):
    """A model spread over ranks. Every rank calls the same methods in the same order."""

    def begin_step(self, step: int) -> None:
        """Take the learning rate of a step, counted from 0, for the updates that follow: none, one or several."""

    def update(self, batches: Sequence[MicroBatch], loss: LossFunction) -> UpdateResult:
        """One update of the weights from this data rank's micro batches of a global batch."""

    def evaluate(self, batches: Sequence[MicroBatch], loss: LossFunction) -> UpdateResult:
        """The loss without an update."""

    def compute_outputs(self, batches: Sequence[MicroBatch]) -> list[TokenOutputs]:
        """Return the model's outputs for each micro batch; every rank of a data rank gets all of it."""

    def compute_reference_outputs(self, batches: Sequence[MicroBatch]) -> list[TokenOutputs]:
        """The same of the model as it was before it learned anything."""

    def export_weights(self, stacked_elements: int = 0) -> Iterator[tuple[str, Tensor]]:
        """The weights under their Hugging Face names, one at a time, in one order on all ranks; all run it to its end.

        A tensor has values on the rank that owns it; on the others it is on the meta device. With `stacked_elements`
        experts come in stacks of no more elements than that, named as in `experts.{8:16/64}.up_proj.weight`.
        """
