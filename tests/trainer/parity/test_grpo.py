"""A step of GRPO is the same in every layout, and its first update is that of plain Transformers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from moejob_api.models.shape import Family
from trainer.parity.cells import FOLDED, LAYOUTS, Cell
from trainer.parity.grpo import (
    EPISODE_SECTIONS,
    SECTIONS,
    LearnedStep,
    by_transformers,
    episodes_by_transformers,
    learn_step,
    recorded,
    recorded_episodes,
    replayed,
)
from trainer.parity.references import Reference
from trainer.rows import make_rows
from trainer.worlds import Worlds

LearnedIn = Callable[[Family, str], Sequence[LearnedStep]]

WITHIN = 1e-5
SINGLE = "single"
# Before a layout: Megatron's own models compute it.
MEGATRON = "Megatron "
SHARED: dict[str, Any] = {
    "FSDP over DP3": {"data": 3},
    "FSDP over TP2.EP2.DP2": {"tensor": 2, "expert": 2, "data": 2, **FOLDED},
}
CELLS = [
    *((Family.QWEN3_MOE, layout) for layout in (SINGLE, "TP2", "PP2", "PP2.VPP2", "EP2", "CP2", "DP2", "TP2.PP2.EP2")),
    (Family.QWEN2, "DP2"),
    (Family.OLMOE, "TP2"),
    (Family.MINIMAX_M2, "EP2"),
    (Family.ERNIE4_5_MOE, "PP2"),
    *((Family.QWEN3_MOE, layout) for layout in SHARED),
    *((Family.QWEN3_MOE, MEGATRON + layout) for layout in (SINGLE, "TP2", "PP2.VPP2", "CP2", "DP2", "TP2.PP2.EP2")),
    (Family.QWEN2, MEGATRON + "DP2"),
]


@pytest.fixture(scope="module")
def learned_in(worlds: Worlds, reference: Reference) -> LearnedIn:
    @cache
    def run(family: Family, layout: str) -> Sequence[LearnedStep]:
        cell, (folder, _) = Cell(family, SECTIONS | _sections(layout)), reference(family)
        return worlds.run(cell.ranks(), learn_step, cell, folder, recorded(folder))

    return run


ALWAYS_MEGATRON = [(Family.QWEN3_MOE, MEGATRON + layout) for layout in (SINGLE, "TP2.PP2.EP2")]
ALWAYS = [cell for cell in CELLS if not cell[1].startswith(MEGATRON)] + ALWAYS_MEGATRON


@pytest.mark.parametrize(("family", "layout"), make_rows(CELLS, ALWAYS))
def test_the_first_update_is_that_of_transformers(
    learned_in: LearnedIn, reference: Reference, family: Family, layout: str
) -> None:
    folder, _ = reference(family)
    loss, norm = by_transformers(folder, recorded(folder))
    for rank in learned_in(family, layout):
        first = rank.updates[0]
        assert first.loss == pytest.approx(loss, abs=WITHIN)
        assert first.gradient_norm == pytest.approx(norm, rel=10 * WITHIN)


@pytest.mark.parametrize(
    ("family", "layout"),
    make_rows(*([cell for cell in cells if cell[0] is Family.QWEN3_MOE] for cells in (CELLS, ALWAYS))),
)
def test_the_second_update_is_the_same_in_every_layout(learned_in: LearnedIn, family: Family, layout: str) -> None:
    single = learned_in(family, SINGLE)[0]
    for rank in learned_in(family, layout):
        np.testing.assert_allclose(_numbers(rank), _numbers(single), rtol=10 * WITHIN, atol=WITHIN)


REPLAYED = [SINGLE, "TP2", "PP2.VPP2", "EP2", "CP2", "DP2", "FSDP over TP2.EP2.DP2"]


@pytest.fixture(scope="module")
def replayed_in(worlds: Worlds, reference: Reference) -> Callable[[str], Sequence[LearnedStep]]:
    @cache
    def run(layout: str) -> Sequence[LearnedStep]:
        sections = {**SECTIONS, "grpo": {**SECTIONS["grpo"], "routingReplay": True}, **_sections(layout)}
        cell, (folder, _) = Cell(Family.QWEN3_MOE, sections), reference(Family.QWEN3_MOE)
        return worlds.run(cell.ranks(), learn_step, cell, folder, replayed(recorded(folder)))

    return run


@pytest.mark.parametrize("layout", make_rows(REPLAYED, (SINGLE, "PP2.VPP2", "CP2", "FSDP over TP2.EP2.DP2")))
def test_a_step_on_the_experts_of_engines_is_that_of_transformers_on_them(
    replayed_in: Callable[[str], Sequence[LearnedStep]], reference: Reference, layout: str
) -> None:
    folder, _ = reference(Family.QWEN3_MOE)
    loss, norm = by_transformers(folder, replayed(recorded(folder)))
    assert abs(loss - by_transformers(folder, recorded(folder))[0]) > 100 * WITHIN
    for rank in replayed_in(layout):
        first = rank.updates[0]
        assert first.loss == pytest.approx(loss, abs=WITHIN)
        assert first.gradient_norm == pytest.approx(norm, rel=10 * WITHIN)
        # The reference model routes by itself, and so says something else of the same tokens.
        assert first.metrics["kl"] > 1e-4
        # Old log-probabilities are of the same experts: nothing has moved before the first update.
        assert first.metrics["clipLow"] == first.metrics["clipHigh"] == 0.0
        np.testing.assert_allclose(_numbers(rank), _numbers(replayed_in(SINGLE)[0]), rtol=10 * WITHIN, atol=WITHIN)


@pytest.fixture(scope="module")
def episodes_in(worlds: Worlds, reference: Reference) -> Callable[[str], Sequence[LearnedStep]]:
    @cache
    def run(layout: str) -> Sequence[LearnedStep]:
        cell, (folder, _) = Cell(Family.QWEN3_MOE, EPISODE_SECTIONS | _sections(layout)), reference(Family.QWEN3_MOE)
        return worlds.run(cell.ranks(), learn_step, cell, folder, recorded_episodes(folder))

    return run


@pytest.mark.parametrize("layout", [SINGLE, "DP2", "TP2.PP2.EP2", MEGATRON + "TP2.PP2.EP2"])
def test_rollouts_of_several_rows_in_groups_of_any_size_are_learned_as_transformers_does(
    episodes_in: Callable[[str], Sequence[LearnedStep]], reference: Reference, layout: str
) -> None:
    folder, _ = reference(Family.QWEN3_MOE)
    loss, norm = episodes_by_transformers(folder, recorded_episodes(folder))
    for rank in episodes_in(layout):
        assert rank.updates[0].loss == pytest.approx(loss, abs=WITHIN)
        assert rank.updates[0].gradient_norm == pytest.approx(norm, rel=10 * WITHIN)
        np.testing.assert_allclose(_numbers(rank), _numbers(episodes_in(SINGLE)[0]), rtol=10 * WITHIN, atol=WITHIN)


@pytest.mark.parametrize("layout", [SINGLE, MEGATRON + SINGLE])
def test_the_reference_model_stays_where_training_began(learned_in: LearnedIn, layout: str) -> None:
    first, second = (update.metrics["kl"] for update in learned_in(Family.QWEN3_MOE, layout)[0].updates)
    assert first == pytest.approx(0.0, abs=1e-9)
    assert second > 1e-5


def test_how_far_engines_are_off_is_told_of_all_tokens(learned_in: LearnedIn, reference: Reference) -> None:
    noise = recorded(reference(Family.QWEN3_MOE)[0])
    assert noise.engine.any()
    for layout in (SINGLE, "DP2", "PP2"):
        for rank in learned_in(Family.QWEN3_MOE, layout):
            # Normal, with a deviation of 0.1, over 66 tokens.
            assert 0.05 < rank.updates[0].metrics["mismatchMean"] < 0.12
            assert 0.15 < rank.metrics["mismatchMaximum"] < 0.4
            single = learned_in(Family.QWEN3_MOE, SINGLE)[0].metrics["mismatchMaximum"]
            assert rank.metrics["mismatchMaximum"] == pytest.approx(single, abs=WITHIN)


def _sections(layout: str) -> dict[str, Any]:
    if layout.startswith(MEGATRON):
        return {"model": {"implementation": "Megatron"}, **_sections(layout.removeprefix(MEGATRON))}
    if layout in SHARED:
        return {"parallelism": SHARED[layout], "memory": {"sharding": "FSDP"}}
    return {"parallelism": {} if layout == SINGLE else LAYOUTS[layout]}


def _numbers(rank: LearnedStep) -> list[list[float]]:
    names = ("entropy", "kl", "clipLow", "clipHigh", "mismatchMean", "mismatchWeight")
    return [[update.loss, update.gradient_norm, *(update.metrics[name] for name in names)] for update in rank.updates]
