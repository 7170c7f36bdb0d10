"""Numbers of GRPO that were worked out by hand, as checks that can be asked of any implementation.

The seeded mistakes are implementations too: each of them must fail a check.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from moejob_api.job.grpo import (
    AdvantageEstimator,
    ImportanceLevel,
    KlKind,
    LossAggregation,
    MismatchCorrection,
    MismatchMode,
    OverlongAnswers,
    PolicyLoss,
)
from moejob_trainer.objectives.grpo.advantages import EPSILON, compute_advantages
from moejob_trainer.objectives.grpo.loss import (
    Clipping,
    LossMask,
    compute_log_ratios,
    compute_token_weights,
    estimate_kl,
    is_clipped_high,
    is_clipped_low,
    mismatch_weights,
    policy_loss,
)
from moejob_trainer.objectives.grpo.sampling import has_all_rewards, has_signal, overlong_penalty


def full_group_advantages(kind: AdvantageEstimator, rewards: Any, token_rewards: Any) -> Any:
    """Return advantages of groups of one size. rewards [groups, members]"""
    return compute_advantages(kind, rewards.flatten(), np.arange(rewards.size) // rewards.shape[1], token_rewards)


@dataclass(frozen=True)
class Implementation:
    """The functions that are checked."""

    advantages: Callable[..., Any] = full_group_advantages
    log_ratios: Callable[..., Any] = compute_log_ratios
    policy_loss: Callable[..., Any] = policy_loss
    divergence: Callable[..., Any] = estimate_kl
    mismatch_weights: Callable[..., Any] = mismatch_weights
    weights: Callable[..., Any] = compute_token_weights
    overlong_penalty: Callable[..., Any] = overlong_penalty
    has_signal: Callable[..., Any] = has_signal
    is_complete: Callable[..., Any] = has_all_rewards


# Two documents of three and two tokens; the first token of each is of the prompt.
TWO = LossMask(torch.tensor([False, True, True, False, True]), torch.tensor([0, 0, 0, 1, 1]), 2)
REWARDS = np.array([[1.0, 0.0, 0.0, 0.0], [2.0, 4.0, 6.0, 8.0]])


def _each(values: Any) -> list[float]:
    """The first token's advantage of each answer of one token."""
    return [float(value[0]) for value in values]


def _of_rewards(made: Implementation, kind: AdvantageEstimator) -> list[float]:
    return _each(made.advantages(kind, REWARDS, [np.zeros(1)] * 8))


def grpo_divides_by_the_deviation_of_the_group(made: Implementation) -> None:
    # Deviations 1/2 and sqrt(20 / 3).
    half, wide = 0.5 + EPSILON, math.sqrt(20 / 3) + EPSILON
    expected = [0.75 / half, *[-0.25 / half] * 3, -3 / wide, -1 / wide, 1 / wide, 3 / wide]
    assert _of_rewards(made, AdvantageEstimator.GRPO) == pytest.approx(expected, rel=1e-9)


def dr_grpo_takes_the_mean_away(made: Implementation) -> None:
    assert _of_rewards(made, AdvantageEstimator.DR_GRPO) == pytest.approx([0.75, -0.25, -0.25, -0.25, -3, -1, 1, 3])


def rloo_compares_with_the_others(made: Implementation) -> None:
    expected = [1, -1 / 3, -1 / 3, -1 / 3, -4, -4 / 3, 4 / 3, 4]
    assert _of_rewards(made, AdvantageEstimator.RLOO) == pytest.approx(expected)


def reinforce_normalises_rewards_to_go_over_the_step(made: Implementation) -> None:
    # Two answers of two and one tokens: to go 1, 1.5 and 0; mean 2.5 / 3, deviation sqrt(7) / sqrt(18).
    values = made.advantages(
        AdvantageEstimator.REINFORCE_PLUS_PLUS, np.array([[1.0, 0.0]]), [np.array([-0.5, 0.5]), np.zeros(1)]
    )
    mean, deviation = 2.5 / 3, math.sqrt(7 / 18) + EPSILON
    expected = [(1 - mean) / deviation, (1.5 - mean) / deviation, -mean / deviation]
    assert np.concatenate(values).tolist() == pytest.approx(expected, rel=1e-9)


def penalties_of_tokens_count_in_the_reward_of_the_answer(made: Implementation) -> None:
    # 1 - 0.6 and 0: mean 0.2.
    values = made.advantages(AdvantageEstimator.DR_GRPO, np.array([[1.0, 0.0]]), [np.array([-0.2, -0.4]), np.zeros(3)])
    assert [value.tolist() for value in values] == [pytest.approx([0.2, 0.2]), pytest.approx([-0.2, -0.2, -0.2])]


def a_ratio_of_tokens_is_new_by_old(made: Implementation) -> None:
    new, old = torch.tensor([9.0, 0.5, 0.1, 9.0, -0.2]), torch.tensor([0.0, 0.2, 0.0, 0.0, 0.1])
    found = made.log_ratios(ImportanceLevel.TOKEN, new, old, TWO)
    assert found[TWO.mask].tolist() == pytest.approx([0.3, 0.1, -0.3])


def a_ratio_of_sequences_is_the_mean_over_the_answer(made: Implementation) -> None:
    new, old = torch.tensor([9.0, 0.5, 0.1, 9.0, -0.2]), torch.tensor([0.0, 0.2, 0.0, 0.0, 0.1])
    found = made.log_ratios(ImportanceLevel.SEQUENCE, new, old, TWO)
    assert found[TWO.mask].tolist() == pytest.approx([0.2, 0.2, -0.3])


def _losses(made: Implementation, kind: PolicyLoss, dual: float | None = None) -> list[float]:
    """Of ratios 0.5, 1 and 4 with advantages 2 and -2."""
    ratios = torch.tensor([0.5, 1.0, 4.0] * 2, dtype=torch.float64).log()
    signs = torch.tensor([2.0] * 3 + [-2.0] * 3, dtype=torch.float64)
    said = torch.full_like(ratios, -3)
    found: list[float] = made.policy_loss(kind, ratios, said, signs, Clipping(0.2, 0.5, dual)).tolist()
    return found


def clipping_keeps_the_worse_of_both(made: Implementation) -> None:
    assert _losses(made, PolicyLoss.CLIP) == pytest.approx([-1, -2, -3, 1.6, 2, 8])


def a_dual_clip_bounds_what_a_negative_advantage_costs(made: Implementation) -> None:
    assert _losses(made, PolicyLoss.CLIP, 3.0) == pytest.approx([-1, -2, -3, 1.6, 2, 6])


def cispo_weighs_the_log_probability_by_the_clipped_ratio(made: Implementation) -> None:
    assert _losses(made, PolicyLoss.CISPO) == pytest.approx([4.8, 6, 9, -4.8, -6, -9])


def cispo_learns_from_clipped_tokens(made: Implementation) -> None:
    said = torch.tensor([-1.0], requires_grad=True)
    made.policy_loss(PolicyLoss.CISPO, said + 3, said, torch.tensor([2.0]), Clipping(0.2, 0.5)).sum().backward()
    assert said.grad is not None
    assert said.grad.tolist() == pytest.approx([-3.0])


def divergences_of_a_log_ratio(made: Implementation) -> None:
    expected = {
        KlKind.K1: [0.4, -0.4],
        KlKind.ABS: [0.4, 0.4],
        KlKind.K2: [0.08, 0.08],
        KlKind.K3: [math.exp(-0.4) - 1 + 0.4, math.exp(0.4) - 1 - 0.4],
    }
    for kind, values in expected.items():
        found = made.divergence(kind, torch.tensor([-1.0, -1.0]).double(), torch.tensor([-1.4, -0.6]).double())
        assert found.tolist() == pytest.approx(values), kind


def _mismatched(made: Implementation, **settings: Any) -> list[float]:
    trainer = torch.tensor([9.0, -1.0, -2.0, 9.0, -1.0]).double()
    engine = trainer - torch.tensor([5.0, math.log(3.0), math.log(0.5), 5.0, math.log(0.25)]).double()
    found: list[float] = made.mismatch_weights(MismatchCorrection(**settings), trainer, engine, TWO)[TWO.mask].tolist()
    return found


def weights_of_tokens_are_truncated(made: Implementation) -> None:
    assert _mismatched(made, maximum=2.0) == pytest.approx([2, 0.5, 0.25])


def weights_of_tokens_are_masked_beyond_their_bounds(made: Implementation) -> None:
    assert _mismatched(made, mode=MismatchMode.MASK, maximum=2.0, minimum=0.3) == pytest.approx([0, 0.5, 0])


def weights_of_sequences_are_products(made: Implementation) -> None:
    assert _mismatched(made, level=ImportanceLevel.SEQUENCE, maximum=2.0) == pytest.approx([1.5, 1.5, 0.25])


def sequences_beyond_their_bounds_are_masked_whole(made: Implementation) -> None:
    found = _mismatched(made, level=ImportanceLevel.SEQUENCE, mode=MismatchMode.MASK, maximum=1.2)
    assert found == pytest.approx([0, 0, 0.25])


def _mean(made: Implementation, aggregation: LossAggregation) -> float:
    """Of answers of 1, 3 and 4 tokens, the last of another group, whose tokens lose 1, 2 and 3 each."""
    lengths, losses = np.array([1, 3, 4]), np.array([1.0, 2.0, 3.0])
    found = made.weights(aggregation, lengths.tolist(), [7, 7, 9], 5)
    return float(found.scale * (found.tokens * losses * lengths).sum() / (found.tokens * lengths).sum())


def tokens_are_averaged(made: Implementation) -> None:
    assert _mean(made, LossAggregation.TOKEN) == pytest.approx(19 / 8)


def answers_are_averaged(made: Implementation) -> None:
    assert _mean(made, LossAggregation.SEQUENCE) == pytest.approx(2)


def groups_are_averaged(made: Implementation) -> None:
    assert _mean(made, LossAggregation.GROUP) == pytest.approx((7 / 4 + 3) / 2)


def a_constant_divides_whatever_the_lengths(made: Implementation) -> None:
    assert _mean(made, LossAggregation.CONSTANT) == pytest.approx(19 / 15)


def long_answers_cost_more_the_longer_they_are(made: Implementation) -> None:
    settings = OverlongAnswers(penalty=2.0, penalty_tokens=20)
    assert made.overlong_penalty(np.array([5, 80, 90, 100]), 100, settings).tolist() == pytest.approx([0, 0, -1, -2])


def groups_of_equal_rewards_have_no_signal(made: Implementation) -> None:
    assert made.has_signal(np.array([[1.0, 1.0], [1.0, 0.5], [0.0, 0.0]])).tolist() == [False, True, False]


def groups_with_a_failed_reward_are_not_complete(made: Implementation) -> None:
    assert made.is_complete(np.array([[1.0, 1.0], [np.nan, 0.5], [np.inf, 0.0]])).tolist() == [True, False, False]


CHECKS: tuple[Callable[[Implementation], None], ...] = (
    grpo_divides_by_the_deviation_of_the_group,
    dr_grpo_takes_the_mean_away,
    rloo_compares_with_the_others,
    reinforce_normalises_rewards_to_go_over_the_step,
    penalties_of_tokens_count_in_the_reward_of_the_answer,
    a_ratio_of_tokens_is_new_by_old,
    a_ratio_of_sequences_is_the_mean_over_the_answer,
    clipping_keeps_the_worse_of_both,
    a_dual_clip_bounds_what_a_negative_advantage_costs,
    cispo_weighs_the_log_probability_by_the_clipped_ratio,
    cispo_learns_from_clipped_tokens,
    divergences_of_a_log_ratio,
    weights_of_tokens_are_truncated,
    weights_of_tokens_are_masked_beyond_their_bounds,
    weights_of_sequences_are_products,
    sequences_beyond_their_bounds_are_masked_whole,
    tokens_are_averaged,
    answers_are_averaged,
    groups_are_averaged,
    a_constant_divides_whatever_the_lengths,
    long_answers_cost_more_the_longer_they_are,
    groups_of_equal_rewards_have_no_signal,
    groups_with_a_failed_reward_are_not_complete,
)


def fractions_of_clipped_tokens() -> tuple[list[bool], list[bool]]:
    """Of ratios 0.5, 1 and 4 with advantages 2 and -2: which are clipped low, and which high."""
    ratios, signs = torch.tensor([0.5, 1.0, 4.0] * 2).log(), torch.tensor([2.0] * 3 + [-2.0] * 3)
    clipping = Clipping(0.2, 0.5)
    return is_clipped_low(ratios, signs, clipping).tolist(), is_clipped_high(ratios, signs, clipping).tolist()
