"""Estimators of KL(policy || reference) from sampled tokens, by their log-ratio d = log p - log p_ref."""

from __future__ import annotations

from typing import assert_never

from torch import Tensor

from moejob_api.job.grpo import KlKind


def estimate_kl(kind: KlKind, log_probabilities: Tensor, reference: Tensor) -> Tensor:
    """Return an estimate for each token. [T]

    K1 is d, Abs |d|, K2 d^2 / 2, K3 exp(-d) - 1 + d: unbiased like K1, and never negative.
    """
    log_ratio = log_probabilities - reference
    match kind:
        case KlKind.K1:
            return log_ratio
        case KlKind.ABS:
            return log_ratio.abs()
        case KlKind.K2:
            return log_ratio.square() / 2
        case KlKind.K3:
            return (-log_ratio).expm1() + log_ratio
        case _:
            assert_never(kind)
