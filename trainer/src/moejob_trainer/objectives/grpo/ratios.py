"""Importance ratios: how much likelier the model makes what an older version of it has sampled."""

from __future__ import annotations

from typing import assert_never

from torch import Tensor

from moejob_api.job.grpo import ImportanceLevel
from moejob_trainer.objectives.grpo.loss_mask import LossMask


def log_ratios(level: ImportanceLevel, new: Tensor, old: Tensor, loss_mask: LossMask) -> Tensor:
    """Return the logarithm of each token's ratio of probabilities, new to old. [T]

    Sequence (GSPO): every token has the ratio of its answer to the power of 1 / its length, which is the mean of the
    logarithms. exp((0.3 + 0.1) / 2) for an answer of two tokens that became likelier by exp(0.3) and exp(0.1).
    """
    ratios = new - old
    match level:
        case ImportanceLevel.TOKEN:
            return ratios
        case ImportanceLevel.SEQUENCE:
            return loss_mask.expand_to_tokens(loss_mask.document_means(ratios))
        case _:
            assert_never(level)
