"""Advantages: a rollout's reward compared with others, so that only rollouts better than usual become likelier.

Groups have any number of rollouts. Worked example, rewards 1, 0, 0, 0 of one group, mean 1/4: DrGRPO gives 0.75 and
-0.25; GRPO divides these by the deviation 0.5; RLOO compares with the mean of the three others and gives 1 and -1/3.
A rollout alone in its group has nothing to be compared with: its advantage is 0, as in a group of equal rewards, and
the run continues. ReinforcePlusPlus compares with the whole step and treats it like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt

from moejob_api.job.grpo import AdvantageEstimator

Floats = npt.NDArray[np.floating[Any]]
Integers = npt.NDArray[np.integer[Any]]

# TRL's; a group whose rewards differ by less than this carries no signal worth amplifying.
EPSILON = 1e-4


def compute_advantages(
    kind: AdvantageEstimator, rewards: Floats, groups: Integers, token_rewards: Sequence[Floats]
) -> list[Floats]:
    """Return the advantage of each token that the model wrote in each rollout.

    rewards [rollouts] belong to whole rollouts, groups [rollouts] name the group of each. `token_rewards` has for each
    rollout a reward of each of these tokens, such as a KL penalty: [tokens], zeros where there is none.
    """
    lengths = [len(values) for values in token_rewards]
    rollout_rewards = rewards.astype(np.float64) + np.array([values.sum() for values in token_rewards])
    match kind:
        case AdvantageEstimator.GRPO:
            return _spread_over_tokens(_compare_within_groups(_normalise_rewards, rollout_rewards, groups), lengths)
        case AdvantageEstimator.DR_GRPO:
            return _spread_over_tokens(_compare_within_groups(_centre_rewards, rollout_rewards, groups), lengths)
        case AdvantageEstimator.RLOO:
            return _spread_over_tokens(_compare_within_groups(_compare_with_others, rollout_rewards, groups), lengths)
        case AdvantageEstimator.REINFORCE_PLUS_PLUS:
            return _whiten_values(
                [
                    rollout_reward + _rewards_to_go(token_values)
                    for rollout_reward, token_values in zip(rewards, token_rewards, strict=True)
                ]
            )
        case _:
            assert_never(kind)


def _compare_within_groups(compare: Callable[[Floats], Floats], rewards: Floats, groups: Integers) -> Floats:
    compared = np.zeros_like(rewards)
    for group in np.unique(groups):
        is_member = groups == group
        compared[is_member] = compare(rewards[is_member])
    return compared


def _centre_rewards(group_rewards: Floats) -> Floats:
    centred: Floats = group_rewards - group_rewards.mean()
    return centred


def _normalise_rewards(group_rewards: Floats) -> Floats:
    # One value has no deviation of a sample; its distance from the mean is 0 anyway.
    deviation = group_rewards.std(ddof=1) if len(group_rewards) > 1 else 0.0
    return _centre_rewards(group_rewards) / (deviation + EPSILON)


def _compare_with_others(group_rewards: Floats) -> Floats:
    members = len(group_rewards)
    return _centre_rewards(group_rewards) * members / max(members - 1, 1)


def _spread_over_tokens(values: Floats, lengths: Sequence[int]) -> list[Floats]:
    return [np.full(length, value) for value, length in zip(values, lengths, strict=True)]


def _rewards_to_go(token_rewards: Floats) -> Floats:
    """Return for each token the sum of its own reward and the rewards of all tokens behind it."""
    return token_rewards.astype(np.float64)[::-1].cumsum()[::-1]


def _whiten_values(values: Sequence[Floats]) -> list[Floats]:
    """Return values of mean 0 and deviation 1 over all tokens of the step: REINFORCE++ has no baseline of a group."""
    all_values = np.concatenate(values)
    return [(value - all_values.mean()) / (all_values.std() + EPSILON) for value in values]
