"""GRPO learns sums from their reward in the steps of the example; with the reward's sign turned it unlearns them."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from trainer.objectives.grpo.learning import learned, taught
from trainer.worlds import Worlds

SEEDS = (1, 2, 3) if os.environ.get("MOEJOB_LEARNING") == "full" else (1,)


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The model that a run of a seed starts from; taught when first asked for."""

    @cache
    def written(seed: int) -> Path:
        folder = tmp_path_factory.mktemp("start")
        taught(seed, folder)
        return folder

    return written


def _in_the_end(right: list[float]) -> float:
    return float(np.mean(right[-5:]))


@pytest.mark.parametrize("seed", SEEDS)
def test_nine_of_ten_sums_are_right_in_the_end(
    worlds: Worlds, start: Callable[[int], Path], tmp_path: Path, seed: int
) -> None:
    (right,) = worlds.run(1, learned, start(seed), seed, 1.0, tmp_path)
    assert 0.3 < right[0] < 0.8
    assert _in_the_end(right) > 0.9


@pytest.mark.thorough
@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("staleness", [1, 4])
def test_answers_of_older_weights_teach_as_much(
    worlds: Worlds, start: Callable[[int], Path], tmp_path: Path, seed: int, staleness: int
) -> None:
    (right,) = worlds.run(1, learned, start(seed), seed, 1.0, tmp_path, staleness)
    assert _in_the_end(right) > 0.9


@pytest.mark.thorough
def test_with_its_sign_turned_a_reward_is_avoided(worlds: Worlds, start: Callable[[int], Path], tmp_path: Path) -> None:
    (right,) = worlds.run(1, learned, start(1), 1, -1.0, tmp_path)
    assert _in_the_end(right) < 0.5 * right[0]
