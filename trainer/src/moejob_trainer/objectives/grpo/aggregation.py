"""Weights of tokens, by which the losses of an update become one number.

The engine divides a sum of weighted losses by the sum of their weights over the whole update, whatever the layout. With
answers of 2 and 6 tokens, weights of each token are
Token: 1 and 1, divided by 8: the mean over tokens (DAPO), in which long answers count more.
Sequence: 1/2 and 1/6, divided by 2: the mean over answers of their means (GRPO).
Group: 1 / the tokens of all answers of the group, divided by the number of groups.
Constant: 1 and 1, and the sum is to be divided by answers x maxNewTokens (Dr. GRPO): `scale` makes up for the 8.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import assert_never

import numpy as np
import numpy.typing as npt

from moejob_api.job.grpo import LossAggregation


@dataclass(frozen=True, slots=True, eq=False)
class TokenWeights:
    """The weights of an update's tokens."""

    # float64 [answers], of each token of the answer.
    tokens: npt.NDArray[np.float64]
    # Factor of every loss.
    scale: float = 1.0


def compute_token_weights(
    aggregation: LossAggregation, lengths: Sequence[int], groups: Sequence[int], max_new_tokens: int
) -> TokenWeights:
    """Return the weights of an update's answers, given their tokens (0: left out) and the groups they belong to."""
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
