"""Stages of which every replica keeps a share only train the model that Transformers trains in one process."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from builders import merged
from moejob_api.models.shape import Family
from trainer.parity.cells import FOLDED, Cell, Steps, assert_like, trained
from trainer.worlds import Worlds

Reference = Callable[[Family], tuple[Path, Steps]]

WITHIN = 1e-5
SHARDED: dict[str, Any] = {"memory": {"sharding": "FSDP"}}
LAYOUTS: dict[str, dict[str, Any]] = {
    "alone": {},
    "DP2": {"data": 2},
    # Three ranks divide nothing evenly.
    "DP3": {"data": 3},
    "DP4": {"data": 4},
    "TP2.DP2": {"tensor": 2, "data": 2},
    "EP2": {"expert": 2},
    "EP2.DP2": {"expert": 2, "data": 2},
    "EP2 folded over DP4": {"expert": 2, "data": 4, **FOLDED},
    "ETP2 folded over DP4": {"data": 4, "expertTensor": 2, **FOLDED},
    "CP2": {"context": 2},
    "TP2.CP2.EP4 folded over TP2.CP2.DP2": {"tensor": 2, "context": 2, "data": 2, "expert": 4, **FOLDED},
}


def _holds(worlds: Worlds, reference: Reference, cell: Cell) -> None:
    folder, expected = reference(cell.family)
    assert_like(worlds.run(cell.ranks(), trained, cell, folder), expected, within=WITHIN)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("family", [Family.QWEN3_MOE, Family.MIXTRAL, Family.DEEPSEEK_V3])
def test_a_layout_of_shares_trains_what_transformers_trains(
    worlds: Worlds, reference: Reference, family: Family, layout: str
) -> None:
    _holds(worlds, reference, Cell(family, merged(SHARDED, {"parallelism": LAYOUTS[layout]})))
