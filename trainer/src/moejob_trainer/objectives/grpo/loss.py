"""The loss of a micro batch of answers, put together of its parts. docs/grpo.md has the formula."""

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

# Extras of a document that the loss reads: of each token the advantage and log-probabilities, and of the whole the
# factor that its aggregation asks for. OLD is absent when the step makes one update: then nothing is older.
ADVANTAGE, ENGINE, OLD, REFERENCE, SCALE = "advantage", "engine", "old", "reference", "scale"


def grpo_loss(grpo: Grpo, outputs: TokenOutputs, batch: MicroBatch) -> LossTerms:
    """Return the weighted sum of the losses of the answers' tokens."""
    own, clipping = answers(batch), Clipping(grpo.clip_low, grpo.clip_high, grpo.dual_clip)
    # Before anything is computed: a ratio that overflows on a prompt would make the gradient of its whole answer NaN.
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
    """Return the log-probabilities of the version that answered, by the trainer's own arithmetic. [T]"""
    return batch.extras.get(OLD, outputs.log_probabilities.detach())


def mismatch(outputs: TokenOutputs, batch: MicroBatch) -> Tensor:
    """Return the distance of the engine's log-probabilities from the trainer's of the same weights. [T]"""
    return (sampled_with(outputs, batch) - batch.extras[ENGINE]).abs()


def _mean(values: Tensor, own: Answers) -> Mean:
    """Return the mean over all tokens of answers, however these are weighted."""
    return Mean(own.only(values.detach()).sum(), own.mask.sum())
