"""The share of the optimizer's state in host memory: as near to what was asked for as whole pieces come."""

from __future__ import annotations

import pytest

from moejob_trainer.megatron.optimizer import moved_to_host


@pytest.mark.parametrize(
    ("sizes", "share", "moved"),
    [
        pytest.param([8, 4, 2, 2], 0.0, [], id="none"),
        pytest.param([8, 4, 2, 2], 1.0, [0, 1, 2, 3], id="all"),
        pytest.param([8, 4, 2, 2], 0.5, [0], id="half"),
        pytest.param([2, 8, 2, 4], 0.375, [0, 3], id="what does not fit is passed over"),
        pytest.param([8, 4, 2, 3], 0.01, [2], id="a small share moves the smallest"),
        pytest.param([], 0.5, [], id="a rank without pieces"),
    ],
)
def test_pieces_that_are_moved(sizes: list[int], share: float, moved: list[int]) -> None:
    assert sorted(moved_to_host(sizes, share)) == moved
