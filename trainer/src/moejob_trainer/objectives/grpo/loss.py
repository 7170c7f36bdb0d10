"""The loss of a step's answers: what each of their tokens adds, and how the update's tokens become one number.

A micro batch of packed rollouts comes in, and a weighted sum goes out. The functions lie in the order of `grpo_loss`:
the loss mask, ratios, the policy loss, weights against the mismatch of trainer and engine, KL, and last the weights of
tokens by their aggregation. Knows tensors and the settings of a job; not who samples or rewards answers, nor how
ranks, engines and optimizers work. docs/grpo.md has the formula.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from moejob_api.job.grpo import (
    Grpo,
    ImportanceLevel,
    KlKind,
    KlTarget,
    LossAggregation,
    MismatchCorrection,
    MismatchMode,
    PolicyLoss,
)
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
    ratios = compute_log_ratios(grpo.importance, new, old, loss_mask)
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


@dataclass(frozen=True, slots=True, eq=False)
class LossMask:
    """The tokens that carry loss weight, among prompts and padding; sums and means over the answers in each document.

    A document is a row of a rollout. Values of documents [D] and of tokens [T] meet here. Two documents of 3 and 2
    tokens whose last 2 and 1 are answers:

        mask    0 1 1 0 1        document 0 0 0 1 1
        values  9 1 3 9 5        sums     4 5        means  2 5
    """

    # bool [T]: the label is a token of an answer that counts.
    mask: Tensor
    # int64 [T]: number of the document.
    document_of_token: Tensor
    document_count: int

    def mask_values(self, values: Tensor) -> Tensor:
        """Return values in answers and 0 elsewhere, even where a value is infinite; the gradient there is 0 too. [T]"""
        return torch.where(self.mask, values, 0)

    def document_sums(self, values: Tensor) -> Tensor:
        """Return the sum over the answer's tokens of each document. [T] -> [D]"""
        zeros = torch.zeros(self.document_count, dtype=values.dtype, device=values.device)
        return zeros.index_add(0, self.document_of_token, self.mask_values(values))

    def document_means(self, values: Tensor) -> Tensor:
        """Return the mean over the answer's tokens of each document, 0 where there are none. [T] -> [D]"""
        return self.document_sums(values) / self.document_sums(torch.ones_like(values)).clamp(min=1)

    def expand_to_tokens(self, values: Tensor) -> Tensor:
        """Repeat the value of each document for each of its tokens. [D] -> [T]"""
        return values[self.document_of_token]


def build_loss_mask(batch: MicroBatch) -> LossMask:
    """Return the mask of a micro batch: the tokens that carry weight."""
    lengths = batch.cu_lengths.diff().to(torch.int64)
    document_of_token = (
        torch.arange(len(lengths)).repeat_interleave(lengths).to(batch.weights.device, non_blocking=True)
    )
    return LossMask(batch.weights > 0, document_of_token, len(lengths))


def compute_log_ratios(level: ImportanceLevel, new: Tensor, old: Tensor, loss_mask: LossMask) -> Tensor:
    """Return the logarithm of each token's importance ratio, the ratio of probabilities new to old. [T]

    Sequence (GSPO): every token has the ratio of its row to the power of 1 / the tokens of answers there, which is the
    mean of the logarithms. exp((0.3 + 0.1) / 2) for an answer of two tokens that became likelier by exp(0.3) and
    exp(0.1). A row and not a rollout: a model gives a probability to a text that it reads in one pass.
    """
    ratios = new - old
    match level:
        case ImportanceLevel.TOKEN:
            return ratios
        case ImportanceLevel.SEQUENCE:
            return loss_mask.expand_to_tokens(loss_mask.document_means(ratios))
        case _:
            assert_never(level)


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
    """Return the loss that raises the probability of tokens that did better, but not too far at once. [T]

    With r the ratio of new to old probability and A the advantage:
    Clip, of PPO:   -min(r A, clip(r, 1 - clipLow, 1 + clipHigh) A); for negative A at least dualClip A is kept of it.
    CISPO:          -stop_gradient(clip(r, 1 - clipLow, 1 + clipHigh)) A log p, so that clipped tokens are learned
                    from too.
    """
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


def mismatch_weights(settings: MismatchCorrection, trainer: Tensor, engine: Tensor, loss_mask: LossMask) -> Tensor:
    """Return the weight of each token, from log-probabilities of the version that sampled it; no gradient. [T]

    The engine samples an answer by its probabilities, and the trainer differentiates its own. Weights
    p_trainer / p_engine correct this (importance sampling; with Truncate, truncated: TIS). They are bounded, because a
    single one may be huge.
    Sequence: every token has the product over its row.
    """
    weights = _log_mismatch_weights(settings.level, (trainer - engine).detach(), loss_mask).exp()
    match settings.mode:
        case MismatchMode.TRUNCATE:
            return weights.clamp(max=settings.maximum)
        case MismatchMode.MASK:
            is_within = (weights >= settings.minimum) & (weights <= settings.maximum)
            return torch.where(is_within, weights, 0)
        case _:
            assert_never(settings.mode)


def _log_mismatch_weights(level: ImportanceLevel, ratios: Tensor, loss_mask: LossMask) -> Tensor:
    match level:
        case ImportanceLevel.TOKEN:
            return ratios
        case ImportanceLevel.SEQUENCE:
            return loss_mask.expand_to_tokens(loss_mask.document_sums(ratios))
        case _:
            assert_never(level)


def estimate_kl(kind: KlKind, log_probabilities: Tensor, reference: Tensor) -> Tensor:
    """Return an estimate of KL(policy || reference) for each token. [T]

    With d = log p - log p_ref of the sampled token, K1 is d, Abs |d|, K2 d^2 / 2 and K3 exp(-d) - 1 + d, which is
    unbiased like K1 and never negative.
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


@dataclass(frozen=True, slots=True, eq=False)
class TokenWeights:
    """The weights of an update's tokens, by which their losses become one number."""

    # float64 [rollouts], of each token that the model wrote in the rollout, in whichever row.
    tokens: npt.NDArray[np.float64]
    # Factor of every loss.
    scale: float = 1.0


def compute_token_weights(
    aggregation: LossAggregation, lengths: Sequence[int], groups: Sequence[int], max_new_tokens: int
) -> TokenWeights:
    """Return the weights of an update's rollouts, given their tokens (0: left out) and the groups they belong to.

    The tokens of a rollout are those that the model wrote in all of its rows. The training engine divides a sum of
    weighted losses by the sum of their weights over the whole update, whatever the layout. With rollouts of 2 and 6
    tokens, weights of each token are
    Token: 1 and 1, divided by 8: the mean over tokens (DAPO), in which long rollouts count more.
    Sequence: 1/2 and 1/6, divided by 2: the mean over rollouts of their means (GRPO).
    Group: 1 / the tokens of all rollouts of the group, divided by the number of groups.
    Constant: 1 and 1, and the sum is to be divided by rollouts x maxNewTokens (Dr. GRPO): `scale` makes up for the 8.
    """
    tokens = np.asarray(lengths, np.float64)
    divisors = np.maximum(tokens, 1)
    match aggregation:
        case LossAggregation.TOKEN:
            return TokenWeights(np.ones_like(tokens))
        case LossAggregation.SEQUENCE:
            return TokenWeights(1 / divisors)
        case LossAggregation.GROUP:
            _, group_index = np.unique(np.asarray(groups), return_inverse=True)
            return TokenWeights(1 / np.maximum(np.bincount(group_index, tokens), 1)[group_index])
        case LossAggregation.CONSTANT:
            return TokenWeights(np.ones_like(tokens), float(tokens.sum()) / (len(tokens) * max_new_tokens))
        case _:
            assert_never(aggregation)
