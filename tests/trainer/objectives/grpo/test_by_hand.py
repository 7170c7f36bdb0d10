"""The numbers of GRPO against those worked out by hand, and mistakes that these must notice."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from moejob_api.job.grpo import AdvantageEstimator, LossAggregation
from moejob_trainer.objectives.grpo.loss import LossMask
from trainer.objectives.grpo.by_hand import CHECKS, Implementation, fractions_of_clipped_tokens, full_group_advantages

REAL = Implementation()


@pytest.mark.parametrize("check", CHECKS, ids=lambda check: check.__name__)
def test_the_number_is_the_one_worked_out_by_hand(check: Callable[[Implementation], None]) -> None:
    check(REAL)


def test_tokens_count_as_clipped_where_they_would_have_moved_on() -> None:
    low, high = fractions_of_clipped_tokens()
    assert low == [False, False, False, True, False, False]
    assert high == [False, False, True, False, False, False]


def _off_by_one(answers: LossMask) -> LossMask:
    return replace(answers, mask=answers.mask.roll(1))


MISTAKES: dict[str, Implementation] = {
    "advantages with their sign turned": replace(
        REAL, advantages=lambda kind, rewards, own: [-value for value in full_group_advantages(kind, rewards, own)]
    ),
    "advantages over the step instead of the group": replace(
        REAL, advantages=lambda kind, rewards, own: full_group_advantages(kind, rewards.reshape(1, -1), own)
    ),
    "advantages over the wrong axis": replace(
        REAL, advantages=lambda kind, rewards, own: full_group_advantages(kind, rewards.T, own)
    ),
    "penalties of tokens left out": replace(
        REAL, advantages=lambda kind, rewards, own: full_group_advantages(kind, rewards, [value * 0 for value in own])
    ),
    "ratio turned over": replace(
        REAL, log_ratios=lambda level, new, old, own: REAL.log_ratios(level, old, new, own)
    ),
    "mask of the ratio off by one": replace(
        REAL, log_ratios=lambda level, new, old, own: REAL.log_ratios(level, new, old, _off_by_one(own))
    ),
    "a clip that is the same on both sides": replace(
        REAL,
        policy_loss=lambda kind, *found: REAL.policy_loss(kind, *found[:-1], replace(found[-1], high=found[-1].low)),
    ),
    "the dual clip left out": replace(
        REAL, policy_loss=lambda kind, *found: REAL.policy_loss(kind, *found[:-1], replace(found[-1], dual=None))
    ),
    "a gradient through the weight of CISPO": replace(
        REAL,
        policy_loss=lambda kind, ratios, said, signs, clipping: -(
            ratios.exp().clamp(1 - clipping.low, 1 + clipping.high) * signs * said.detach()
            if kind == "CISPO"
            else -REAL.policy_loss(kind, ratios, said, signs, clipping)
        ),
    ),
    "the divergence from the policy instead of to it": replace(
        REAL, divergence=lambda kind, new, reference: REAL.divergence(kind, reference, new)
    ),
    "weights of the mismatch turned over": replace(
        REAL, mismatch_weights=lambda settings, trainer, engine, own: REAL.mismatch_weights(
            settings, engine, trainer, own)
    ),
    "mask of the mismatch off by one": replace(
        REAL, mismatch_weights=lambda settings, trainer, engine, own: REAL.mismatch_weights(
            settings, trainer, engine, _off_by_one(own))
    ),
    "sequences averaged like tokens": replace(
        REAL, weights=lambda aggregation, lengths, groups, most: REAL.weights(
            LossAggregation.TOKEN if aggregation == "Sequence" else aggregation, lengths, groups, most)
    ),
    "groups averaged like sequences": replace(
        REAL, weights=lambda aggregation, lengths, groups, most: REAL.weights(
            LossAggregation.SEQUENCE if aggregation == "Group" else aggregation, lengths, groups, most)
    ),
    "the constant left out": replace(
        REAL, weights=lambda *asked: replace(REAL.weights(*asked), scale=1.0)
    ),
    "a penalty that grows too late": replace(
        REAL, overlong_penalty=lambda lengths, most, settings: REAL.overlong_penalty(lengths, most + 20, settings)
    ),
    "groups without signal turned over": replace(REAL, has_signal=lambda rewards: ~REAL.has_signal(rewards)),
    "a failed reward that counts as 0": replace(
        REAL, is_complete=lambda rewards: REAL.is_complete(np.nan_to_num(rewards))
    ),
}  # fmt: skip


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_noticed(mistake: str) -> None:
    noticed = 0
    for check in CHECKS:
        try:
            check(MISTAKES[mistake])
        except AssertionError:
            noticed += 1
    assert noticed


GROUPED = (AdvantageEstimator.GRPO, AdvantageEstimator.DR_GRPO, AdvantageEstimator.RLOO)


def _found(kind: AdvantageEstimator, rewards: Any) -> Any:
    return np.array([value[0] for value in full_group_advantages(kind, rewards, [np.zeros(1)] * rewards.size)])


@pytest.mark.parametrize("kind", AdvantageEstimator)
def test_advantages_do_not_change_when_all_rewards_shift(kind: AdvantageEstimator) -> None:
    rewards = np.random.default_rng(0).normal(size=(4, 6))
    np.testing.assert_allclose(_found(kind, rewards + 5.0), _found(kind, rewards), atol=1e-12)


@pytest.mark.parametrize("kind", GROUPED)
def test_advantages_of_a_group_do_not_depend_on_other_groups(kind: AdvantageEstimator) -> None:
    rewards = np.random.default_rng(1).normal(size=(4, 6))
    changed = np.concatenate([rewards[:1], rewards[1:] * 7])
    np.testing.assert_array_equal(_found(kind, changed)[:6], _found(kind, rewards)[:6])


@pytest.mark.parametrize(
    ("kind", "factor"),
    [
        (AdvantageEstimator.GRPO, 1),
        (AdvantageEstimator.REINFORCE_PLUS_PLUS, 1),
        (AdvantageEstimator.DR_GRPO, 8),
        (AdvantageEstimator.RLOO, 8),
    ],
)
def test_only_advantages_without_a_deviation_scale_with_rewards(kind: AdvantageEstimator, factor: float) -> None:
    rewards = np.random.default_rng(2).normal(size=(4, 6))
    np.testing.assert_allclose(_found(kind, rewards * 8), factor * _found(kind, rewards), rtol=1e-3)


@pytest.mark.parametrize("kind", AdvantageEstimator)
def test_the_order_of_answers_in_a_group_does_not_matter(kind: AdvantageEstimator) -> None:
    rewards = np.random.default_rng(3).normal(size=(1, 6))
    order = np.random.default_rng(4).permutation(6)
    np.testing.assert_allclose(_found(kind, rewards[:, order]), _found(kind, rewards)[order], rtol=1e-12)


def test_a_document_without_answer_has_a_mean_of_zero() -> None:
    none = LossMask(torch.zeros(3, dtype=torch.bool), torch.zeros(3, dtype=torch.int64), 1)
    assert none.document_means(torch.ones(3)).tolist() == [0.0]
