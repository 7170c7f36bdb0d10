"""The answers of a packed micro batch: which document each token belongs to, and sums over documents."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moejob_trainer.training.micro_batch import MicroBatch


@dataclass(frozen=True, slots=True, eq=False)
class Answers:
    """Tokens that are learned from, among prompts and padding."""

    # bool [T]: the label is a token of an answer that counts.
    mask: Tensor
    # int64 [T]: number of the document.
    owner: Tensor
    count: int

    def only(self, values: Tensor) -> Tensor:
        """Return the values of answers' tokens and 0 for others, whatever these are; so is their gradient. [T]"""
        return torch.where(self.mask, values, 0)

    def sums(self, values: Tensor) -> Tensor:
        """Return the sum over the answer's tokens of each document. [T] -> [D]"""
        zeros = torch.zeros(self.count, dtype=values.dtype, device=values.device)
        return zeros.index_add(0, self.owner, self.only(values))

    def means(self, values: Tensor) -> Tensor:
        """Return the mean over the answer's tokens of each document, 0 where there are none. [T] -> [D]"""
        return self.sums(values) / self.sums(torch.ones_like(values)).clamp(min=1)

    def of_tokens(self, values: Tensor) -> Tensor:
        """Return a value of each document for each of its tokens. [D] -> [T]"""
        return values[self.owner]


def answers(batch: MicroBatch) -> Answers:
    """Return the answers of a micro batch: what carries weight."""
    lengths = batch.cu_lengths.diff().to(torch.int64)
    owner = torch.arange(len(lengths)).repeat_interleave(lengths).to(batch.weights.device, non_blocking=True)
    return Answers(batch.weights > 0, owner, len(lengths))
