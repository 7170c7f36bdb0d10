"""The MTP loss, whatever the objective: the labels are the later tokens of the document."""

from __future__ import annotations

import torch

from moejob_trainer.objectives.losses import cross_entropy
from moejob_trainer.training import LossTerms, MicroBatch, TokenOutputs, WeightedMean


def mtp_loss(outputs: TokenOutputs, batch: MicroBatch) -> LossTerms:
    """Return the mean over modules of their cross-entropies; a label has the weight that it has as the next token.

    The engine divides every module's sum by the weight of the next tokens, as in DeepSeek-V3's report.
    """
    if not outputs.mtp:
        return LossTerms(torch.zeros_like(batch.weights[0]))
    weights = [batch.shift_ahead(batch.weights, by) for by, _ in enumerate(outputs.mtp, 1)]
    losses = torch.stack([cross_entropy(*pair) for pair in zip(outputs.mtp, weights, strict=True)])
    weight = torch.stack(weights).sum()
    return LossTerms(losses.mean(), {"mtpLoss": WeightedMean(losses.sum(), weight)})
