"""Importance sampling against the mismatch of trainer and engine, which give the same token different probabilities.

The engine samples an answer by its probabilities, and the trainer differentiates its own. Weights p_trainer / p_engine
correct this; they are bounded, because a single one may be huge.
"""

from __future__ import annotations

from typing import assert_never

import torch
from torch import Tensor

from moejob_api.job.grpo import ImportanceLevel, MismatchCorrection, MismatchMode
from moejob_trainer.objectives.grpo.loss_mask import LossMask


def mismatch_weights(settings: MismatchCorrection, trainer: Tensor, engine: Tensor, loss_mask: LossMask) -> Tensor:
    """Return the weight of each token, from log-probabilities of the version that sampled it; no gradient. [T]

    Sequence: every token has the product over its answer.
    """
    weights = _log_weights(settings.level, (trainer - engine).detach(), loss_mask).exp()
    match settings.mode:
        case MismatchMode.TRUNCATE:
            return weights.clamp(max=settings.maximum)
        case MismatchMode.MASK:
            is_within = (weights >= settings.minimum) & (weights <= settings.maximum)
            return torch.where(is_within, weights, 0)
        case _:
            assert_never(settings.mode)


def _log_weights(level: ImportanceLevel, ratios: Tensor, loss_mask: LossMask) -> Tensor:
    match level:
        case ImportanceLevel.TOKEN:
            return ratios
        case ImportanceLevel.SEQUENCE:
            return loss_mask.expand_to_tokens(loss_mask.document_sums(ratios))
        case _:
            assert_never(level)
