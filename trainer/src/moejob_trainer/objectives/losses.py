"""Losses as pure functions of tensors: weighted sums, which the training engine divides by the batch's weight."""

from __future__ import annotations

from torch import Tensor


def cross_entropy(log_probabilities: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the negative log-probability of each label. [T], [T] -> []"""
    return -(log_probabilities * weights).sum()
