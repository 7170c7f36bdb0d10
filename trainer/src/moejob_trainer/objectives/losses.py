"""Losses as pure functions of tensors: weighted sums, which the training engine divides by the batch's weight.

The weight of the global batch is summed in megatron/training_engine.py.
"""

from __future__ import annotations

from torch import Tensor


def cross_entropy(log_probabilities: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the negative log-probability of each label. [T], [T] -> []"""
    return -(log_probabilities * weights).sum()
