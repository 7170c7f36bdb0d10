"""The MTP loss, whatever the objective: the labels are the later tokens of the document."""

from __future__ import annotations

import torch

from moejob_trainer.objectives.losses import cross_entropy
from moejob_trainer.training import LossTerms, Mean, MicroBatch, TokenOutputs


def mtp_loss(outputs: TokenOutputs, batch: MicroBatch) -> LossTerms:
    """The mean over modules of the cross-entropy of what each predicts; a label weighs what it weighs as the next one.

    All of them are divided by the same weight later, as in DeepSeek-V3's report: that of the next tokens.
    """
    if not outputs.mtp:
        return LossTerms(torch.zeros_like(batch.weights[0]))
    weights = [batch.ahead(batch.weights, by) for by, _ in enumerate(outputs.mtp, 1)]
    losses = torch.stack([cross_entropy(*pair) for pair in zip(outputs.mtp, weights, strict=True)])
    weight = torch.stack(weights).sum()
    return LossTerms(losses.mean(), {"mtpLoss": Mean(losses.sum(), weight)})
