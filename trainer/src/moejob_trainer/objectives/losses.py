"""Losses as pure functions of tensors. Each is a weighted sum: what it is divided by is known elsewhere."""

from __future__ import annotations

from torch import Tensor


def cross_entropy(log_probabilities: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of the negative log-probability of each label. [T], [T] -> []"""
    return -(log_probabilities * weights).sum()
