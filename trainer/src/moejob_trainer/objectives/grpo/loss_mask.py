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
class Answers:
    """The tokens that carry loss weight, among prompts and padding."""

    # bool [T]: the label is a token of an answer that counts.
    mask: Tensor
    # int64 [T]: number of the document.
    owner: Tensor
    count: int

    def only(self, values: Tensor) -> Tensor:
        """Return values in answers and 0 elsewhere, even where a value is infinite; the gradient there is 0 too. [T]"""
        return torch.where(self.mask, values, 0)

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum over the answer's tokens of each document. [T] -> [D]"""
        zeros = torch.zeros(self.count, dtype=values.dtype, device=values.device)
        return zeros.index_add(0, self.owner, self.only(values))

    def means(self, values: Tensor) -> Tensor:
        """Return the mean over the answer's tokens of each document, 0 where there are none. [T] -> [D]"""
        return self.sums(values) / self.sums(torch.ones_like(values)).clamp(min=1)

    def of_tokens(self, values: Tensor) -> Tensor:
        """Repeat the value of each document for each of its tokens. [D] -> [T]"""
        return values[self.owner]


def answers(batch: MicroBatch) -> Answers:
    """Return the mask of a micro batch: the tokens that carry weight."""
    lengths = batch.cu_lengths.diff().to(torch.int64)
    owner = torch.arange(len(lengths)).repeat_interleave(lengths).to(batch.weights.device, non_blocking=True)
    return Answers(batch.weights > 0, owner, len(lengths))
