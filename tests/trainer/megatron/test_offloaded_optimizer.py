"""The share of the optimizer's state in host memory: as near to what was asked for as whole pieces come."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moejob_trainer.megatron.optimizer import moved_to_host, with_gradients


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


class Gradient:
    """Stands where a gradient does, and notes when it is taken to where its piece is updated."""

    device = torch.device("cpu")

    def __init__(self, number: int, taken: list[int]) -> None:
        self.number, self.taken = number, taken

    def to(self, *_: object, **__: object) -> int:
        self.taken.append(self.number)
        return self.number


@pytest.mark.parametrize(
    ("is_overlapped", "taken_by_then"),
    [
        pytest.param(True, [[0, 1], [0, 1, 2], [0, 1, 2]], id="one group ahead"),
        pytest.param(False, [[0], [0, 1], [0, 1, 2]], id="none ahead, which would need memory"),
    ],
)
def test_gradients_come_with_their_own_group(is_overlapped: bool, taken_by_then: list[list[int]]) -> None:
    taken: list[int] = []
    master = SimpleNamespace(storage=torch.zeros(1))
    groups: Any = [[SimpleNamespace(gradient=Gradient(number, taken), master=master)] for number in range(3)]
    found: Any = with_gradients(groups, is_overlapped=is_overlapped)
    for number, (group, gradients) in enumerate(found):
        assert (group, gradients) == (groups[number], [number])
        assert taken == taken_by_then[number]
    assert taken == [0, 1, 2]
