"""Modules that predict further tokens (MTP) learn what DeepSeek-V3's report says, in every layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from builders import merged
from moejob_api.models.shape import Family
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.topology import stop_groups
from trainer.parity.balancing import LENGTHS, Expected, Rules
from trainer.parity.cells import FOLDED, LAYOUTS, MISTAKEN, Cell, assert_like, started, trained, write_reference
from trainer.parity.further import COEFFICIENT, LAYERS, MODULES, write_further_reference
from trainer.worlds import Worlds

Further = Callable[..., tuple[Path, Expected]]

WITHIN = 1e-5
LEARNED: dict[str, Any] = {"training": {"mtpLossCoefficient": COEFFICIENT}}
ALL: dict[str, dict[str, Any]] = {"one rank": {}} | {
    name: LAYOUTS[name]
    for name in (
        "TP2",
        "PP2",
        "PP2.VPP2",
        "EP2",
        "CP2",
        "DP2",
        "EP4 folded over DP4",
        "TP2.PP2.EP2",
        "TP2.CP2.DP2",
        "PP2.EP2.CP2",
    )
}
MEMORY: dict[str, dict[str, Any]] = {
    "everything recomputed": {"training": {"recompute": {"granularity": "Full"}}},
    "some modules recomputed": {"training": {"recompute": {"granularity": "Selective"}}},
    "activations offloaded": {"memory": {"offloadActivations": True}},
    "a router that is frozen": {"moe": {"freezeRouter": True}},
}


def _cell(layout: dict[str, Any], family: Family = Family.DEEPSEEK_V3, mutant: str = "", **sections: Any) -> Cell:
    return Cell(family, merged(LEARNED, merged(sections, {"parallelism": layout})), mutant)


def _holds(worlds: Worlds, reference: tuple[Path, Expected], cell: Cell) -> None:
    folder, expected = reference
    assert_like(worlds.run(cell.ranks(), trained, cell, folder), expected.steps, within=WITHIN)


@pytest.mark.parametrize("layout", ALL)
def test_further_tokens_are_learned_as_the_report_says(worlds: Worlds, further: Further, layout: str) -> None:
    _holds(worlds, further(Family.DEEPSEEK_V3), _cell(ALL[layout]))


@pytest.mark.parametrize("layout", ["one rank", "TP2", "PP2", "CP2"])
def test_another_family_learns_them_the_same_way(worlds: Worlds, further: Further, layout: str) -> None:
    _holds(worlds, further(Family.GLM4_MOE), _cell(ALL[layout], Family.GLM4_MOE))


@pytest.mark.parametrize("layout", ["one rank", "TP2", "PP2", "TP2.PP2.EP2"])
def test_an_output_layer_that_is_the_embedding_serves_all_three(worlds: Worlds, further: Further, layout: str) -> None:
    _holds(worlds, further(Family.DEEPSEEK_V3, tied=True), _cell(ALL[layout]))


@pytest.mark.parametrize("how", [how for how in MEMORY if "frozen" not in how])
def test_how_memory_is_saved_changes_nothing(worlds: Worlds, further: Further, how: str) -> None:
    _holds(worlds, further(Family.DEEPSEEK_V3), _cell({"tensor": 2, "expert": 2, **FOLDED}, **MEMORY[how]))
