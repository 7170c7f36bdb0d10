"""Randomness without state: numbers and orders that are functions of their keys.

The same on every machine, Python and NumPy, so that a run resumed years later sees the samples it would have seen.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

_ROUNDS = 8
_WORD = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

Numbers = npt.NDArray[np.uint64]


def mix_keys(*keys: int) -> int:
    """A number of 64 bits that looks random and depends on every key and on their order."""
    state = 0
    for key in keys:
        state = _finalize_integer((state + (key & _WORD) + _GOLDEN) & _WORD)
    return state


def shuffle_positions(positions: npt.NDArray[Any], size: int, key: int) -> npt.NDArray[np.int64]:
    """Return the images of positions under a permutation of range(size), without holding the permutation.

    A Feistel network permutes the next power of four; walking on until a value lies in range keeps it a permutation.
    """
    half = max(1, ((size - 1).bit_length() + 1) // 2)
    values = _permute_values(positions.astype(np.uint64), half, key)
    while (outside := values >= np.uint64(size)).any():
        values[outside] = _permute_values(values[outside], half, key)
    return values.astype(np.int64)


def _permute_values(values: Numbers, half: int, key: int) -> Numbers:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for number in range(_ROUNDS):
        left, right = right, left ^ (_finalize_array(right + np.uint64(mix_keys(key, number))) & mask)
    return (left << shift) | right


# The finalizer of SplitMix64, for Python's integers and for arrays, which overflow as it wants.
def _finalize_integer(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _WORD
    return value ^ (value >> 31)


def _finalize_array(values: Numbers) -> Numbers:
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
