"""Every layout trains the model that Transformers trains in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moejob_api.models.shape import Family
from trainer.parity.cells import LAYOUTS, MODELS, Cell, Steps, assert_like, trained
from trainer.worlds import Worlds

Reference = Callable[[Family], tuple[Path, Steps]]

# Relative, of losses and gradient norms in float32.
WITHIN = 1e-5
TRAINED: dict[str, dict[str, Any]] = {
    "everything recomputed": {"training": {"recompute": {"granularity": "Full"}}},
    "norms and activations recomputed": {"training": {"recompute": {"granularity": "Selective"}}},
    "experts recomputed": {"training": {"recompute": {"granularity": "Selective", "modules": ["Experts"]}}},
    "activations offloaded": {"memory": {"offloadActivations": True}},
    "documents apart": {"data": {"packing": False}, "training": {"microBatchSize": 2}},
    "one document at a time": {"data": {"packing": False}, "training": {"microBatchSize": 1}},
    "batches by tokens": {"training": {"dynamicBatchTokens": 48}},
}


def _holds(worlds: Worlds, reference: Reference, cell: Cell) -> None:
    folder, expected = reference(cell.family)
    assert_like(worlds.run(cell.ranks(), trained, cell, folder), expected, within=WITHIN)


@pytest.mark.parametrize("family", MODELS)
def test_one_rank_trains_what_transformers_trains(worlds: Worlds, reference: Reference, family: Family) -> None:
    _holds(worlds, reference, Cell(family, {}))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", [Family.QWEN3_MOE, Family.MIXTRAL, Family.DEEPSEEK_V3])
def test_a_layout_trains_what_transformers_trains(
    worlds: Worlds, reference: Reference, family: Family, layout: str
) -> None:
    _holds(worlds, reference, Cell(family, {"parallelism": LAYOUTS[layout]}))


@pytest.mark.parametrize("how", TRAINED)
def test_how_memory_is_saved_and_batches_are_made_changes_nothing(
    worlds: Worlds, reference: Reference, how: str
) -> None:
    parallelism = {"parallelism": {"tensor": 2, "expert": 2, "expertLayout": "Folded"}}
    _holds(worlds, reference, Cell(Family.QWEN3_MOE, parallelism | TRAINED[how]))


# --- the matrix cannot lie ------------------------------------------------------------------------------------------

MUTANTS = ("gradients over DP", "theta 10000", "two experts swapped", "mask shifted", "a layer skipped")


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mistake_made_on_purpose_is_seen(worlds: Worlds, reference: Reference, mutant: str) -> None:
    cell = Cell(Family.QWEN3_MOE, {"parallelism": {"data": 2}}, mutant)
    with pytest.raises(AssertionError, match=r"off by|Not equal"):
        _holds(worlds, reference, cell)
