"""Orders that are functions: permutations without a list, the same forever."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejob_trainer.data.shuffling import mix_keys, shuffle_positions


@given(st.integers(1, 3000), st.integers(0, 2**64 - 1))
def test_shuffling_moves_every_position_to_a_place_of_its_own(size: int, key: int) -> None:
    assert sorted(shuffle_positions(np.arange(size), size, key).tolist()) == list(range(size))


def test_shuffling_a_part_is_a_part_of_shuffling_all() -> None:
    assert (
        shuffle_positions(np.arange(40, 50), 1000, 5).tolist()
        == shuffle_positions(np.arange(1000), 1000, 5)[40:50].tolist()
    )


def test_every_order_of_four_comes_up_about_as_often_as_the_others() -> None:
    orders = Counter(tuple(shuffle_positions(np.arange(4), 4, mix_keys(7, key)).tolist()) for key in range(24 * 200))
    # 24 orders, 200 of each expected: the chance of a right shuffle to leave 120..280 anywhere is below one in 10^6.
    assert len(orders) == 24
    assert min(orders.values()) > 120
    assert max(orders.values()) < 280


def test_neighbours_do_not_stay_neighbours() -> None:
    order = shuffle_positions(np.arange(10_000), 10_000, 3)
    assert abs(np.corrcoef(np.arange(10_000), order)[0, 1]) < 0.05
    assert (np.abs(np.diff(order)) == 1).sum() < 10


# Written down once: checkpoints of any earlier version have to find their place in the data.
@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        # SplitMix64 of seed 0 begins with this, in Vigna's reference implementation.
        pytest.param((0,), 0xE220A8397B1DCDAF, id="one key is SplitMix64"),
    ],
)
def test_mixed_numbers_stay_what_they_are(keys: tuple[int, ...], expected: int) -> None:
    assert mix_keys(*keys) == expected


def test_shuffled_orders_stay_what_they_are() -> None:
    assert shuffle_positions(np.arange(10), 10, 42).tolist() == [4, 6, 5, 3, 7, 2, 8, 9, 0, 1]
