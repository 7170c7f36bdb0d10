"""Estimators of KL(policy || reference) from sampled tokens, by their log-ratio d = log p - log p_ref."""

from __future__ import annotations

from typing import assert_never

from torch import Tensor

from moejob_api.job.grpo import KlKind


def divergence(kind: KlKind, log_probabilities: Tensor, reference: Tensor) -> Tensor:
    """Return an estimate for each token. [T]

    K1 is d, Abs |d|, K2 d^2 / 2, K3 exp(-d) - 1 + d: unbiased like K1, and never negative.
    """
    ratio = log_probabilities - reference
    match kind:
        case KlKind.K1:
            return ratio
        case KlKind.ABS:
            return ratio.abs()
        case KlKind.K2:
            return ratio.square() / 2
        case KlKind.K3:
            return (-ratio).expm1() + ratio
        case _:
            assert_never(kind)
