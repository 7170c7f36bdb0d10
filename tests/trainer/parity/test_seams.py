"""GRPO's needs of loop and engine, with an objective of the test's own: the same in every layout."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from moejob_api.models.shape import Family
from moejob_trainer.loop import LoopOutcome
from trainer.parity.cells import FOLDED, LAYOUTS, Cell
from trainer.parity.references import Reference
from trainer.parity.seams import STEPS, LearnedRun, said_by_transformers, train_run
from trainer.worlds import Worlds

LearnedIn = Callable[[Family, str], Sequence[LearnedRun]]

WITHIN = 1e-5
SINGLE = "single"
SHARED: dict[str, Any] = {
    "FSDP over DP3": {"data": 3},
    "FSDP over TP2.EP2.DP2": {"tensor": 2, "expert": 2, "data": 2, **FOLDED},
}
CELLS = [
    *((Family.QWEN3_MOE, layout) for layout in (SINGLE, "TP2", "PP2", "PP2.VPP2", "CP2", "DP2", "TP2.PP2.EP2")),
    (Family.DEEPSEEK_V3, "EP4 folded over DP4"),
    (Family.QWEN2, "PP2"),
    *((Family.QWEN3_MOE, layout) for layout in SHARED),
]


@pytest.fixture(scope="module")
def learned_in(worlds: Worlds, reference: Reference) -> LearnedIn:
    @cache
    def run(family: Family, layout: str) -> Sequence[LearnedRun]:
        cell = Cell(family, _sections(layout))
        return worlds.run(cell.ranks(), train_run, cell, reference(family)[0])

    return run


@pytest.mark.parametrize(("family", "layout"), CELLS)
def test_the_model_says_what_transformers_says(
    learned_in: LearnedIn, reference: Reference, family: Family, layout: str
) -> None:
    expected = said_by_transformers(reference(family)[0])
    ranks = learned_in(family, layout)
    assert {number for rank in ranks for number in rank.said} == {*expected}
    for rank in ranks:
        assert rank.said
        for number, said in rank.said.items():
            np.testing.assert_allclose(said, expected[number], rtol=WITHIN, atol=WITHIN, err_msg=f"document {number}")


@pytest.mark.parametrize(("family", "layout"), CELLS)
def test_every_tensor_comes_once_and_as_it_was_read(
    learned_in: LearnedIn, reference: Reference, family: Family, layout: str
) -> None:
    published = _published(reference(family)[0] / "first")
    weights = [rank.weights[0] for rank in learned_in(family, layout)]
    assert sorted(name for of_rank in weights for name in of_rank) == sorted(published)
    for name, tensor in _merged(weights).items():
        np.testing.assert_array_equal(tensor, published[name], err_msg=name)


@pytest.mark.parametrize(("family", "layout"), [cell for cell in CELLS if cell[1] != SINGLE])
def test_several_updates_a_step_learn_the_same_in_every_layout(
    learned_in: LearnedIn, family: Family, layout: str
) -> None:
    single = learned_in(family, SINGLE)[0]
    ranks = learned_in(family, layout)
    for rank in ranks:
        assert rank.outcome is LoopOutcome.COMPLETED
        assert [len(updates) for updates in rank.updates] == [2] * STEPS
        np.testing.assert_allclose(_numbers(rank), _numbers(single), rtol=WITHIN)
    later = _merged([rank.weights[1] for rank in ranks])
    for name, tensor in single.weights[1].items():
        bound = 20 * WITHIN * float(np.abs(tensor).max())
        np.testing.assert_allclose(later[name], tensor, rtol=0, atol=bound, err_msg=name)


def test_the_second_update_of_a_step_is_measured_against_what_was_said_before_the_first(learned_in: LearnedIn) -> None:
    for updates in learned_in(Family.QWEN3_MOE, "DP2")[0].updates:
        first, second = (update.metrics["ratio"] for update in updates)
        assert first == pytest.approx(1.0, abs=1e-6)
        assert abs(second - 1.0) > 1e-4


def _sections(layout: str) -> dict[str, Any]:
    if layout in SHARED:
        return {"parallelism": SHARED[layout], "memory": {"sharding": "FSDP"}}
    return {"parallelism": {} if layout == SINGLE else LAYOUTS[layout]}


def _numbers(rank: LearnedRun) -> list[list[float]]:
    updates = [update for of_step in rank.updates for update in of_step]
    return [[one.loss, one.gradient_norm, one.tokens, one.metrics["ratio"], one.metrics["entropy"]] for one in updates]


def _merged(weights: Sequence[Any]) -> dict[str, Any]:
    return {name: tensor for of_rank in weights for name, tensor in of_rank.items()}


def _published(folder: Path) -> dict[str, Any]:
    return _merged([load_file(path) for path in sorted(folder.glob("*.safetensors"))])
