"""The policy loss of each token: what raises the probability of tokens that did better, but not too far at once.

With r the ratio of new to old probability and A the advantage:
Clip, of PPO:   -min(r A, clip(r, 1 - clipLow, 1 + clipHigh) A); for negative A at least dualClip A is kept of it.
CISPO:          -stop_gradient(clip(r, 1 - clipLow, 1 + clipHigh)) A log p, so that clipped tokens are learned from too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import assert_never

import torch
from torch import Tensor

from moejob_api.job.grpo import PolicyLoss


@dataclass(frozen=True, slots=True)
class Clipping:
    """The ratios that count."""

    low: float
    high: float
    # Largest ratio for a negative advantage, where PPO has no bound. None: no bound.
    dual: float | None = None


def policy_loss(
    kind: PolicyLoss, log_ratios: Tensor, log_probabilities: Tensor, advantages: Tensor, clipping: Clipping
) -> Tensor:
    """Return the loss of each token. [T]"""
    match kind:
        case PolicyLoss.CLIP:
            return _clipped_surrogate_loss(log_ratios.exp(), advantages, clipping)
        case PolicyLoss.CISPO:
            weights = log_ratios.detach().exp().clamp(1 - clipping.low, 1 + clipping.high)
            return -weights * advantages * log_probabilities
        case _:
            assert_never(kind)


def _clipped_surrogate_loss(ratios: Tensor, advantages: Tensor, clipping: Clipping) -> Tensor:
    clipped_ratios = ratios.clamp(1 - clipping.low, 1 + clipping.high)
    surrogate = torch.minimum(ratios * advantages, clipped_ratios * advantages)
    if clipping.dual is None:
        return -surrogate
    return -torch.where(advantages < 0, torch.maximum(surrogate, clipping.dual * advantages), surrogate)


def is_clipped_low(log_ratios: Tensor, advantages: Tensor, clipping: Clipping) -> Tensor:
    """Return the tokens that would be made even less likely, had they not been clipped. bool [T]"""
    return (log_ratios.exp() < 1 - clipping.low) & (advantages < 0)


def is_clipped_high(log_ratios: Tensor, advantages: Tensor, clipping: Clipping) -> Tensor:
    """Return the tokens that would be made even likelier, had they not been clipped. bool [T]"""
    return (log_ratios.exp() > 1 + clipping.high) & (advantages > 0)
