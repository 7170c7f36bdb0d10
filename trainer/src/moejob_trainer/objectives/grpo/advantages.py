"""Advantages: an answer's reward compared with others, so that only answers better than usual become likelier.

Rewards are [groups, members], of the answers to one prompt in a row. Worked example, rewards 1, 0, 0, 0 of one group,
mean 1/4: DrGRPO gives 0.75 and -0.25; GRPO divides these by the deviation 0.5; RLOO compares with the mean of the three
others and gives 1 and -1/3.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, assert_never

import numpy as np
import numpy.typing as npt

from moejob_api.job.grpo import AdvantageEstimator

Floats = npt.NDArray[np.floating[Any]]

# TRL's; a group whose rewards differ by less than this carries no signal worth amplifying.
EPSILON = 1e-4


def compute_advantages(kind: AdvantageEstimator, rewards: Floats, token_rewards: Sequence[Floats]) -> list[Floats]:
    """Return the advantage of each token of each answer.

    rewards [groups, members] belong to whole answers. The second array of each answer, in the same order, has a reward
    of each token, such as a KL penalty: [tokens], zeros where there is none.
    """
    lengths = [len(values) for values in token_rewards]
    answer_rewards = rewards.astype(np.float64) + np.array([answer.sum() for answer in token_rewards]).reshape(
        rewards.shape
    )
    match kind:
        case AdvantageEstimator.GRPO:
            return _spread_over_tokens(_normalise_rewards(answer_rewards), lengths)
        case AdvantageEstimator.DR_GRPO:
            return _spread_over_tokens(_centre_rewards(answer_rewards), lengths)
        case AdvantageEstimator.RLOO:
            members = answer_rewards.shape[1]
            return _spread_over_tokens(_centre_rewards(answer_rewards) * members / (members - 1), lengths)
        case AdvantageEstimator.REINFORCE_PLUS_PLUS:
            return _whiten_values(
                [
                    answer_reward + _rewards_to_go(token_values)
                    for answer_reward, token_values in zip(rewards.flatten(), token_rewards, strict=True)
                ]
            )
        case _:
            assert_never(kind)


def _centre_rewards(rewards: Floats) -> Floats:
    centred: Floats = rewards - rewards.mean(1, keepdims=True)
    return centred


def _normalise_rewards(rewards: Floats) -> Floats:
    normalised: Floats = _centre_rewards(rewards) / (rewards.std(1, ddof=1, keepdims=True) + EPSILON)
    return normalised


def _spread_over_tokens(values: Floats, lengths: Sequence[int]) -> list[Floats]:
    return [np.full(length, value) for value, length in zip(values.flatten(), lengths, strict=True)]


def _rewards_to_go(token_rewards: Floats) -> Floats:
    """Return for each token the sum of its own reward and the rewards of all tokens behind it."""
    return token_rewards.astype(np.float64)[::-1].cumsum()[::-1]


def _whiten_values(values: Sequence[Floats]) -> list[Floats]:
    """Return values of mean 0 and deviation 1 over all tokens of the step: REINFORCE++ has no baseline of a group."""
    all_values = np.concatenate(values)
    return [(value - all_values.mean()) / (all_values.std() + EPSILON) for value in values]
