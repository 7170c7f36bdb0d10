"""GRPO learns sums from their reward in the steps of the example; with the reward's sign turned it unlearns them."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from trainer.objectives.grpo.learning import learned, taught
from trainer.worlds import Worlds

SEEDS = (1, 2, 3) if os.environ.get("MOEJOB_LEARNING") == "full" else (1,)


@pytest.fixture
def start(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    folder = tmp_path / "start"
    taught(request.param, folder)
    return folder


def _in_the_end(right: list[float]) -> float:
    return float(np.mean(right[-5:]))


@pytest.mark.parametrize(("start", "seed"), [(seed, seed) for seed in SEEDS], indirect=["start"])
def test_nine_of_ten_sums_are_right_in_the_end(worlds: Worlds, start: Path, tmp_path: Path, seed: int) -> None:
    (right,) = worlds.run(1, learned, start, seed, 1.0, tmp_path)
    assert 0.3 < right[0] < 0.8
    assert _in_the_end(right) > 0.9


@pytest.mark.parametrize("start", [1], indirect=True)
def test_with_its_sign_turned_a_reward_is_avoided(worlds: Worlds, start: Path, tmp_path: Path) -> None:
    (right,) = worlds.run(1, learned, start, 1, -1.0, tmp_path)
    assert _in_the_end(right) < 0.5 * right[0]
