"""The loss mask of a packed micro batch: the tokens of answers, and sums and means over each document's answer.

Values of documents [D] and of tokens [T] meet here. Two documents of 3 and 2 tokens whose last 2 and 1 are answers:

    mask    0 1 1 0 1        document 0 0 0 1 1
    values  9 1 3 9 5        sums     4 5        means  2 5
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moejob_trainer.training.micro_batch import MicroBatch


@dataclass(frozen=True, slots=True, eq=False)
class LossMask:
    """The tokens that carry loss weight, among prompts and padding."""

    # bool [T]: the label is a token of an answer that counts.
    mask: Tensor
    # int64 [T]: number of the document.
    document_of_token: Tensor
    document_count: int

    def mask_values(self, values: Tensor) -> Tensor:
        """Return values in answers and 0 elsewhere, even where a value is infinite; the gradient there is 0 too. [T]"""
        return torch.where(self.mask, values, 0)

    def document_sums(self, values: Tensor) -> Tensor:
        """Return the sum over the answer's tokens of each document. [T] -> [D]"""
        zeros = torch.zeros(self.document_count, dtype=values.dtype, device=values.device)
        return zeros.index_add(0, self.document_of_token, self.mask_values(values))

    def document_means(self, values: Tensor) -> Tensor:
        """Return the mean over the answer's tokens of each document, 0 where there are none. [T] -> [D]"""
        return self.document_sums(values) / self.document_sums(torch.ones_like(values)).clamp(min=1)

    def expand_to_tokens(self, values: Tensor) -> Tensor:
        """Repeat the value of each document for each of its tokens. [D] -> [T]"""
        return values[self.document_of_token]


def build_loss_mask(batch: MicroBatch) -> LossMask:
    """Return the mask of a micro batch: the tokens that carry weight."""
    lengths = batch.cu_lengths.diff().to(torch.int64)
    document_of_token = (
        torch.arange(len(lengths)).repeat_interleave(lengths).to(batch.weights.device, non_blocking=True)
    )
    return LossMask(batch.weights > 0, document_of_token, len(lengths))
