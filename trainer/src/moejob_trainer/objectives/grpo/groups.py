"""Groups without a signal, groups without all rewards, and the penalty of long answers."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from moejob_api.job.grpo import OverlongAnswers

Floats = npt.NDArray[np.floating[Any]]
Booleans = npt.NDArray[np.bool_]


def has_signal(rewards: Floats) -> Booleans:
    """Return the groups whose rewards differ; in all others every advantage is 0. [groups, members] -> [groups]"""
    differs: Booleans = np.ptp(rewards, axis=1) > 0
    return differs


def has_all_rewards(rewards: Floats) -> Booleans:
    """Return the groups with a reward for every answer; a failed reward is NaN. [groups, members] -> [groups]"""
    is_rewarded: Booleans = np.isfinite(rewards.sum(axis=1))
    return is_rewarded


def overlong_penalty(lengths: npt.NDArray[np.integer[Any]], max_new_tokens: int, settings: OverlongAnswers) -> Floats:
    """Return the addition to the reward of answers of these lengths: 0, then linear down to -penalty.

    With maxNewTokens 100, penaltyTokens 20 and penalty 1: 0 up to 80 tokens, -0.5 at 90, -1 at 100 (DAPO).
    """
    excess_tokens = np.clip(lengths - (max_new_tokens - settings.penalty_tokens), 0, settings.penalty_tokens)
    penalties: Floats = -settings.penalty * excess_tokens / settings.penalty_tokens
    return penalties
