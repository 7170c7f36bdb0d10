"""The loss of a micro batch of rollouts, in its order: ratios, policy loss, mismatch weights, KL, entropy, weights.

docs/grpo.md has the formula.
"""

from __future__ import annotations

from torch import Tensor

from moejob_api.job.grpo import Grpo, KlTarget
from moejob_trainer.objectives.grpo.kl import estimate_kl
from moejob_trainer.objectives.grpo.loss_mask import LossMask, build_loss_mask
from moejob_trainer.objectives.grpo.mismatch import mismatch_weights
from moejob_trainer.objectives.grpo.policy_loss import Clipping, is_clipped_high, is_clipped_low, policy_loss
from moejob_trainer.objectives.grpo.ratios import log_ratios
from moejob_trainer.training.interface import LossTerms, TokenOutputs, WeightedMean
from moejob_trainer.training.micro_batch import MicroBatch

# Extras of a document that the loss reads: an advantage and log-probabilities of each token, and one factor of the
# aggregation. OLD is absent when a step makes one update: the model itself sampled the answers.
ADVANTAGE, ENGINE, OLD, REFERENCE, SCALE = "advantage", "engine", "old", "reference", "scale"


def grpo_loss(grpo: Grpo, outputs: TokenOutputs, batch: MicroBatch) -> LossTerms:
    """Return the weighted sum of the losses of the answers' tokens."""
    loss_mask, clipping = build_loss_mask(batch), Clipping(grpo.clip_low, grpo.clip_high, grpo.dual_clip)
    # Prompts are masked first: a ratio that overflows there would make the gradient of the whole answer NaN.
    new, old = (
        loss_mask.mask_values(outputs.log_probabilities),
        loss_mask.mask_values(old_log_probabilities(outputs, batch)),
    )
    advantages = loss_mask.mask_values(batch.extras[ADVANTAGE])
    ratios = log_ratios(grpo.importance, new, old, loss_mask)
    losses = policy_loss(grpo.policy_loss, ratios, new, advantages, clipping)
    means = {
        "entropy": outputs.entropy,
        "clipLow": is_clipped_low(ratios.detach(), advantages, clipping),
        "clipHigh": is_clipped_high(ratios.detach(), advantages, clipping),
        "mismatchMean": engine_mismatch(outputs, batch),
    }
    if grpo.mismatch is not None:
        means["mismatchWeight"] = mismatch_weights(
            grpo.mismatch, old, loss_mask.mask_values(batch.extras[ENGINE]), loss_mask
        )
        losses = losses * means["mismatchWeight"]
    if REFERENCE in batch.extras:
        means["kl"] = estimate_kl(grpo.kl.kind, new, loss_mask.mask_values(batch.extras[REFERENCE]))
        if grpo.kl.apply_to is KlTarget.LOSS:
            losses = losses + grpo.kl.coefficient * means["kl"]
    if grpo.entropy_coefficient > 0:
        losses = losses - grpo.entropy_coefficient * loss_mask.mask_values(outputs.entropy)
    scales = loss_mask.expand_to_tokens(batch.extras[SCALE])
    total = loss_mask.mask_values(losses * batch.weights * scales).sum()
    return LossTerms(total, {name: _masked_mean(values, loss_mask) for name, values in means.items()})


def old_log_probabilities(outputs: TokenOutputs, batch: MicroBatch) -> Tensor:
    """Return the trainer's log-probabilities by the weights that sampled the answers. [T]"""
    return batch.extras.get(OLD, outputs.log_probabilities.detach())


def engine_mismatch(outputs: TokenOutputs, batch: MicroBatch) -> Tensor:
    """Return |log-probability of the trainer - of the engine|, both by the weights that sampled the answers. [T]"""
    return (old_log_probabilities(outputs, batch) - batch.extras[ENGINE]).abs()


def _masked_mean(values: Tensor, loss_mask: LossMask) -> WeightedMean:
    """Return the mean over all tokens of answers, whatever their weights."""
    return WeightedMean(loss_mask.mask_values(values.detach()).sum(), loss_mask.mask.sum())
