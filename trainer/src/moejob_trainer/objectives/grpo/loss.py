"""The loss of a micro batch of rollouts, in its order: ratios, policy loss, mismatch weights, KL, entropy, weights.

docs/grpo.md has the formula.
"""

from __future__ import annotations

from torch import Tensor

from moejob_api.job.grpo import Grpo, KlTarget
from moejob_trainer.objectives.grpo.kl import divergence
from moejob_trainer.objectives.grpo.loss_mask import Answers, answers
from moejob_trainer.objectives.grpo.mismatch import mismatch_weights
from moejob_trainer.objectives.grpo.policy_loss import Clipping, clipped_high, clipped_low, policy_loss
from moejob_trainer.objectives.grpo.ratios import log_ratios
from moejob_trainer.training.interface import LossTerms, Mean, TokenOutputs
from moejob_trainer.training.micro_batch import MicroBatch

# Extras of a document that the loss reads: an advantage and log-probabilities of each token, and one factor of the
# aggregation. OLD is absent when a step makes one update: the model itself sampled the answers.
ADVANTAGE, ENGINE, OLD, REFERENCE, SCALE = "advantage", "engine", "old", "reference", "scale"


def grpo_loss(grpo: Grpo, outputs: TokenOutputs, batch: MicroBatch) -> LossTerms:
    """Return the weighted sum of the losses of the answers' tokens."""
    own, clipping = answers(batch), Clipping(grpo.clip_low, grpo.clip_high, grpo.dual_clip)
    # Prompts are masked first: a ratio that overflows there would make the gradient of the whole answer NaN.
    new, old = own.only(outputs.log_probabilities), own.only(sampled_with(outputs, batch))
    advantages = own.only(batch.extras[ADVANTAGE])
    ratios = log_ratios(grpo.importance, new, old, own)
    losses = policy_loss(grpo.policy_loss, ratios, new, advantages, clipping)
    means = {
        "entropy": outputs.entropy,
        "clipLow": clipped_low(ratios.detach(), advantages, clipping),
        "clipHigh": clipped_high(ratios.detach(), advantages, clipping),
        "mismatchMean": mismatch(outputs, batch),
    }
    if grpo.mismatch is not None:
        means["mismatchWeight"] = mismatch_weights(grpo.mismatch, old, own.only(batch.extras[ENGINE]), own)
        losses = losses * means["mismatchWeight"]
    if REFERENCE in batch.extras:
        means["kl"] = divergence(grpo.kl.kind, new, own.only(batch.extras[REFERENCE]))
        if grpo.kl.apply_to is KlTarget.LOSS:
            losses = losses + grpo.kl.coefficient * means["kl"]
    if grpo.entropy_coefficient > 0:
        losses = losses - grpo.entropy_coefficient * own.only(outputs.entropy)
    scales = own.of_tokens(batch.extras[SCALE])
    total = own.only(losses * batch.weights * scales).sum()
    return LossTerms(total, {name: _mean(values, own) for name, values in means.items()})


def sampled_with(outputs: TokenOutputs, batch: MicroBatch) -> Tensor:
    """Return the trainer's log-probabilities by the weights that sampled the answers. [T]"""
    return batch.extras.get(OLD, outputs.log_probabilities.detach())


def mismatch(outputs: TokenOutputs, batch: MicroBatch) -> Tensor:
    """Return |log-probability of the trainer - of the engine|, both by the weights that sampled the answers. [T]"""
    return (sampled_with(outputs, batch) - batch.extras[ENGINE]).abs()


def _mean(values: Tensor, own: Answers) -> Mean:
    """Return the mean over all tokens of answers, whatever their weights."""
    return Mean(own.only(values.detach()).sum(), own.mask.sum())
