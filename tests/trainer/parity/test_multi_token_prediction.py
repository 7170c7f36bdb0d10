"""Modules that predict further tokens (MTP) learn what DeepSeek-V3's report says, in every layout."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from builders import merge_sections
from moejob_api.models.families import shape_of
from moejob_api.models.shape import Family
from moejob_trainer.conversion.families import build_tensor_table
from moejob_trainer.conversion.model_export import ExportTarget, export_weights
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.topology import stop_groups
from moejob_trainer.megatron.weights import named_weights
from trainer.parity.balancing import LENGTHS, Expected, Rules
from trainer.parity.cells import (
    FOLDED,
    LAYOUTS,
    MISTAKEN,
    Cell,
    assert_like,
    measure_update,
    start_engine,
    train_cell,
    write_reference,
)
from trainer.parity.multi_token_prediction import COEFFICIENT, LAYERS, MODULES
from trainer.rows import make_rows
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
# The first and the last layer on one rank and on several, and each way of dividing what lies between.
MIXED = ("one rank", "PP2.VPP2", "EP4 folded over DP4", "TP2.PP2.EP2", "TP2.CP2.DP2")
MEMORY: dict[str, dict[str, Any]] = {
    "everything recomputed": {"training": {"recompute": {"granularity": "Full"}}},
    "some modules recomputed": {"training": {"recompute": {"granularity": "Selective"}}},
    "activations offloaded": {"memory": {"offloadActivations": True}},
}


def _cell(layout: dict[str, Any], family: Family = Family.DEEPSEEK_V3, mutant: str = "", **sections: Any) -> Cell:
    return Cell(family, merge_sections(LEARNED, merge_sections(sections, {"parallelism": layout})), mutant)


def _assert_like_reference(worlds: Worlds, reference: tuple[Path, Expected], cell: Cell) -> None:
    folder, expected = reference
    assert_like(worlds.run(cell.ranks(), train_cell, cell, folder), expected.steps, within=WITHIN)


@pytest.mark.parametrize("layout", make_rows(ALL, MIXED))
def test_further_tokens_are_learned_as_the_report_says(worlds: Worlds, further: Further, layout: str) -> None:
    _assert_like_reference(worlds, further(Family.DEEPSEEK_V3), _cell(ALL[layout]))


@pytest.mark.parametrize(
    ("family", "layout"),
    make_rows(
        product((Family.GLM4_MOE, Family.GLM4_MOE_LITE), ("one rank", "TP2", "PP2", "CP2")),
        [(Family.GLM4_MOE, "TP2"), (Family.GLM4_MOE, "PP2"), (Family.GLM4_MOE_LITE, "TP2")],
    ),
)
def test_another_family_learns_them_the_same_way(worlds: Worlds, further: Further, family: Family, layout: str) -> None:
    _assert_like_reference(worlds, further(family), _cell(ALL[layout], family))


@pytest.mark.parametrize("layout", make_rows(("one rank", "TP2", "PP2", "TP2.PP2.EP2"), ("one rank", "TP2", "PP2")))
def test_an_output_layer_that_is_the_embedding_serves_all_three(worlds: Worlds, further: Further, layout: str) -> None:
    _assert_like_reference(worlds, further(Family.DEEPSEEK_V3, tied=True), _cell(ALL[layout]))


@pytest.mark.parametrize("how", make_rows(MEMORY, ("everything recomputed",)))
def test_how_memory_is_saved_changes_nothing(worlds: Worlds, further: Further, how: str) -> None:
    _assert_like_reference(
        worlds, further(Family.DEEPSEEK_V3), _cell({"tensor": 2, "expert": 2, **FOLDED}, **MEMORY[how])
    )


SHARES: dict[str, dict[str, Any]] = {
    "DP3": {"data": 3},
    "TP2.EP2.DP2": {"tensor": 2, "expert": 2, "data": 2, **FOLDED},
}


@pytest.mark.parametrize(
    ("layout", "tied"), make_rows(product(SHARES, (False, True)), [("DP3", True), ("TP2.EP2.DP2", False)])
)
def test_replicas_that_divide_everything_learn_them_too(
    worlds: Worlds, further: Further, layout: str, *, tied: bool
) -> None:
    _assert_like_reference(
        worlds, further(Family.DEEPSEEK_V3, tied=tied), _cell(SHARES[layout], memory={"sharding": "FSDP"})
    )


# --- what else is learned with them ---------------------------------------------------------------------------------

RULES: dict[str, tuple[Rules, dict[str, Any]]] = {
    "losses": (
        Rules(Family.DEEPSEEK_V3, coefficient=0.5, z_coefficient=0.01),
        {"balancing": "AuxLoss", "auxLossCoefficient": 0.5, "zLossCoefficient": 0.01},
    ),
    "a bias": (
        Rules(Family.DEEPSEEK_V3, bias_rate=0.05),
        {"balancing": "ExpertBias", "expertBiasUpdateRate": 0.05},
    ),
}


def _balanced_cell(moe: dict[str, Any], layout: dict[str, Any]) -> Cell:
    cell = _cell(layout, moe=moe, data={"packing": False}, training={"microBatchSize": 2})
    return replace(cell, lengths=LENGTHS)


BALANCED = ("one rank", "TP2", "PP2", "CP2", "EP2")
ALWAYS = [*product(("losses",), ("one rank", "PP2", "CP2")), *product(("a bias",), ("TP2", "EP2"))]


@pytest.mark.parametrize(("how", "layout"), make_rows(product(RULES, (*BALANCED, "TP2.CP2.DP2")), ALWAYS))
def test_their_experts_are_balanced_over_the_tokens_they_see(
    worlds: Worlds, further: Further, how: str, layout: str
) -> None:
    rules, moe = RULES[how]
    folder, expected = further(Family.DEEPSEEK_V3, rules)
    cell = _balanced_cell(moe, ALL[layout])
    found = worlds.run(cell.ranks(), train_cell, cell, folder)
    assert_like(found, expected.steps, within=WITHIN)
    # The first layer has no experts.
    names = [*(f"layers.{index}" for index in range(1, LAYERS)), *(f"mtp.{index}.layer" for index in range(MODULES))]
    biases = dict(zip(names, expected.selection_biases, strict=True))
    assert {name for of_rank in found for name in of_rank.selection_biases} == {
        f"{name}.moe.router.selection_bias" for name in names
    }
    for of_rank in found:
        for name, bias in of_rank.selection_biases.items():
            np.testing.assert_allclose(bias, biases[name.removesuffix(".moe.router.selection_bias")], atol=1e-6)


MEASURED = ("one rank", "PP2.VPP2", "TP2.CP2.DP2")


def test_their_layers_are_measured_behind_the_last(worlds: Worlds, further: Further) -> None:
    folder, _ = further(Family.DEEPSEEK_V3)
    alone, *others = (
        worlds.run(cell.ranks(), measure_update, cell, folder) for cell in (_cell(ALL[name]) for name in MEASURED)
    )
    assert alone[0]["mtpLoss"] > 1.0
    assert alone[0]["worstExpertLayer"] in range(1, LAYERS + MODULES)
    for of_ranks in others:
        for metrics in of_ranks:
            for name in ("mtpLoss", "expertImbalance", "worstExpertLayer", "routerEntropy", "idleExperts"):
                assert metrics[name] == pytest.approx(alone[0][name], rel=1e-5), name


# --- where nothing is learned of them -------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", ["TP2", "PP2"])
def test_a_model_is_trained_without_them_where_the_job_says_so(worlds: Worlds, tmp_path: Path, layout: str) -> None:
    expected = write_reference(Family.DEEPSEEK_V3, tmp_path, num_nextn_predict_layers=1)
    _publish_mtp(tmp_path / "first")
    sections = {"parallelism": LAYOUTS[layout], "training": {"mtpLossCoefficient": 0.0}}
    cell = Cell(Family.DEEPSEEK_V3, sections)
    assert_like(worlds.run(cell.ranks(), train_cell, cell, tmp_path), expected, within=WITHIN)


def _publish_mtp(folder: Path) -> None:
    """Adds what Transformers leaves out of the files: a module behind the last layer."""
    shape = shape_of(json.loads((folder / "config.json").read_text()))
    assert len(shape.mtp_layers) == 1
    file = folder / "model.safetensors"
    present, whole = load_file(file), build_tensor_table(shape)
    added = {piece.tensor: torch.ones(piece.shape) for piece in whole.pieces if piece.tensor not in present}
    assert any(name.endswith("eh_proj.weight") for name in added)
    save_file(present | added, file, {"format": "pt"})


# --- as they are published ------------------------------------------------------------------------------------------


def export_model(cell: Cell, folder: Path, target: Path) -> None:
    """Exports what was read."""
    use_cpu()
    try:
        engine = start_engine(cell, folder)
        place = ExportTarget(target, folder / "first", torch.float32)
        export_weights(
            named_weights(engine.stages), build_tensor_table(engine.model.shape), engine.placement.model_groups, place
        )
    finally:
        stop_groups()


@pytest.mark.parametrize("layout", ["one rank", "PP2.VPP2", "TP2.PP2.EP2"])
@pytest.mark.parametrize("tied", [False, True])
def test_they_are_published_as_they_were_to_the_bit(
    worlds: Worlds, further: Further, tmp_path: Path, layout: str, *, tied: bool
) -> None:
    folder, _ = further(Family.DEEPSEEK_V3, tied=tied)
    cell = _cell(ALL[layout])
    worlds.run(cell.ranks(), export_model, cell, folder, tmp_path / "export")
    written: dict[str, torch.Tensor] = {}
    for path in (tmp_path / "export").glob("*.safetensors"):
        written |= load_file(path)
    source = load_file(folder / "first" / "model.safetensors")
    embedding = source["model.embed_tokens.weight"]
    for index in range(LAYERS, LAYERS + MODULES):
        # Engines look for their own copies of what is the model's.
        source[f"model.layers.{index}.embed_tokens.weight"] = embedding
        source[f"model.layers.{index}.shared_head.head.weight"] = source.get("lm_head.weight", embedding)
    assert written.keys() == source.keys()
    assert [name for name, tensor in source.items() if not torch.equal(written[name], tensor)] == []
    assert json.loads((tmp_path / "export" / "config.json").read_text())["num_nextn_predict_layers"] == MODULES


# --- the matrix cannot lie ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mutant", MISTAKEN)
def test_a_mistake_made_on_purpose_is_seen(worlds: Worlds, further: Further, mutant: str) -> None:
    with pytest.raises(AssertionError, match=r"Not equal"):
        _assert_like_reference(worlds, further(Family.DEEPSEEK_V3), _cell(ALL["CP2"], mutant=mutant))


def test_a_coefficient_that_is_ignored_is_seen(worlds: Worlds, further: Further) -> None:
    cell = _cell(ALL["DP2"])
    other = replace(cell, sections=merge_sections(cell.sections, {"training": {"mtpLossCoefficient": 2 * COEFFICIENT}}))
    with pytest.raises(AssertionError, match=r"Not equal"):
        _assert_like_reference(worlds, further(Family.DEEPSEEK_V3), other)
