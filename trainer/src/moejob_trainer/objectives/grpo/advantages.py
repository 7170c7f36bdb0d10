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

from moejob_api.job.grpo import Advantage

Floats = npt.NDArray[np.floating[Any]]

# TRL's; a group whose rewards differ by less than this carries no signal worth amplifying.
EPSILON = 1e-4


def advantages(kind: Advantage, rewards: Floats, answers: Sequence[Floats]) -> list[Floats]:
    """Return the advantage of each token of each answer.

    rewards [groups, members] belong to whole answers. The second array of each answer, in the same order, has a reward
    of each token, such as a KL penalty: [tokens], zeros where there is none.
    """
    lengths = [len(answer) for answer in answers]
    whole = rewards.astype(np.float64) + np.array([answer.sum() for answer in answers]).reshape(rewards.shape)
    match kind:
        case Advantage.GRPO:
            return _spread(_normalised(whole), lengths)
        case Advantage.DR_GRPO:
            return _spread(_centred(whole), lengths)
        case Advantage.RLOO:
            members = whole.shape[1]
            return _spread(_centred(whole) * members / (members - 1), lengths)
        case Advantage.REINFORCE_PLUS_PLUS:
            return _whitened([last + _to_go(own) for last, own in zip(rewards.flatten(), answers, strict=True)])
        case _:
            assert_never(kind)


def _centred(rewards: Floats) -> Floats:
    found: Floats = rewards - rewards.mean(1, keepdims=True)
    return found


def _normalised(rewards: Floats) -> Floats:
    found: Floats = _centred(rewards) / (rewards.std(1, ddof=1, keepdims=True) + EPSILON)
    return found


def _spread(values: Floats, lengths: Sequence[int]) -> list[Floats]:
    return [np.full(length, value) for value, length in zip(values.flatten(), lengths, strict=True)]


def _to_go(own: Floats) -> Floats:
    """Return for each token its own reward and those of all tokens behind it."""
    return own.astype(np.float64)[::-1].cumsum()[::-1]


def _whitened(values: Sequence[Floats]) -> list[Floats]:
    """Return values of mean 0 and deviation 1 over all tokens of the step: REINFORCE++ has no baseline of a group."""
    every = np.concatenate(values)
    return [(value - every.mean()) / (every.std() + EPSILON) for value in values]
