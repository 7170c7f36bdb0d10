"""Documents and the micro batches that they are packed into.

Knows neither where documents come from nor what the loss is; never imports Megatron.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

# Stands in MicroBatch.documents for a slot that holds nothing but padding.
FILLER = -1

# The input that replays a routing. Of each token, in each layer with experts, one more than the experts it goes to;
# where it is 0, in padding and where nothing is known, a token routes by itself. [length, routed layers, k]
ROUTING = "routing"

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """Tokens that see each other and nothing else, with the weight of each in the loss."""

    tokens: Array  # [length]
    # [length], of the loss of predicting each token. Nothing predicts the first, so its weight never counts.
    weights: Array
    id: int
    source: int = 0
    # About the prediction of each token ([length, ...], moved with the labels) or about the document (a scalar).
    extras: Mapping[str, Array] = field(default_factory=dict)
    # About each token as input ([length, ...], not moved): routing to replay.
    inputs: Mapping[str, Array] = field(default_factory=dict)

    def __post_init__(self) -> None:
        length = len(self.tokens)
        if length == 0 or self.tokens.ndim != 1 or self.weights.shape != self.tokens.shape:
            raise ValueError(
                f"document {self.id} has tokens of shape {self.tokens.shape} and weights of {self.weights.shape}; "
                "expected two equal lengths above 0"
            )
        if not np.isfinite(self.weights).all() or (self.weights < 0).any():
            raise ValueError(f"document {self.id} has a weight that is negative or not finite")
        per_token = [*self.inputs.items(), *((name, value) for name, value in self.extras.items() if value.ndim)]
        for name, value in per_token:
            if value.shape[:1] != (length,):
                raise ValueError(f"{name} of document {self.id} has shape {value.shape} for {length} tokens")

    @property
    def loss_weight(self) -> float:
        """The document's part of the loss weight of its batch."""
        return float(self.weights[1:].sum(dtype=np.float64))


@dataclass(frozen=True, slots=True, eq=False)
class MicroBatch:
    """Documents one after another in slots; what one rank sends through the model at once.

    labels[i] is the token after tokens[i] in the same document, weights[i] the weight of predicting it. The last
    position of a document and all padding weigh nothing.
    """

    tokens: Tensor  # int64 [T]
    labels: Tensor  # int64 [T]
    weights: Tensor  # float32 [T]
    positions: Tensor  # int64 [T]
    cu_lengths: Tensor  # int32 [D + 1], where slots begin, and T
    documents: tuple[int, ...]  # [D], places in the list that was batched, or FILLER
    extras: Mapping[str, Tensor]  # each [T, ...] or, about documents, [D]
    lengths: tuple[int, ...]  # [D], tokens of each slot that are not padding

    def without_extra(self, name: str) -> MicroBatch:
        """Return the micro batch without one of its extras."""
        return replace(self, extras={key: value for key, value in self.extras.items() if key != name})

    def real_token_mask(self) -> Tensor:
        """bool [T]: which tokens are no padding."""
        mask = torch.zeros(len(self.tokens), dtype=torch.bool)
        for start, length in zip(self.cu_lengths.tolist(), self.lengths, strict=False):
            mask[start : start + length] = True
        return mask

    def shift_ahead(self, values: Tensor, by: int) -> Tensor:
        """Return for each token the value `by` tokens later in its document, zero beyond the end. [T] -> [T]"""
        ends = self.cu_lengths[1:].repeat_interleave(self.cu_lengths.diff())
        is_inside = torch.arange(by, by + len(values)) < ends
        return values.roll(-by) * is_inside.to(values.device, non_blocking=True)
