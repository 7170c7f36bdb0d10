"""Adapters train as the merged model says, in every layout, and are published in PEFT's format."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from builders import merge_sections
from moejob_api.models.shape import Family
from moejob_trainer.conversion.adapters import AdapterTarget, build_adapter_table, export_adapters
from moejob_trainer.conversion.gathering import hugging_face_tensors
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.state import StateFiles, saved_parameters
from moejob_trainer.megatron.topology import stop_groups
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine
from moejob_trainer.megatron.weights import initialise_adapters, named_weights, whole_adapters
from moejob_trainer.model.adapters import adapter_parameters
from moejob_trainer.model.parameters import model_parameters
from trainer.parity.cells import (
    STEPS,
    Cell,
    assert_like,
    make_loss,
    micro_batches,
    start_engine,
    train_cell,
    update_parameters,
)
from trainer.parity.lora import ALPHA, LORA, RANK
from trainer.parity.references import Reference
from trainer.rows import make_rows
from trainer.worlds import Worlds

WITHIN = 1e-5
# The first gradients of Transformers in float32 are 1.5e-5 off those in float64, as they are after half a unit in the
# last place of each weight. Ours are 9e-6 off; by the third step, that has become 2e-5 of the norm.
WITHIN_OF_LINEAR_ATTENTION = 5e-5
FOLDED: dict[str, Any] = {"expertLayout": "Folded"}
LAYOUTS: dict[str, dict[str, Any]] = {
    "one rank": {},
    "TP2": {"tensor": 2},
    "EP2": {"expert": 2},
    "PP2": {"pipeline": 2},
    "CP2": {"context": 2},
    "ETP2 folded": {"data": 2, "expertTensor": 2, **FOLDED},
    "TP2.EP2.ETP2 folded over TP2.DP2": {"tensor": 2, "data": 2, "expert": 2, "expertTensor": 2, **FOLDED},
}
FAMILIES = [Family.QWEN3_MOE, Family.DEEPSEEK_V3]
LINEAR = [Family.QWEN3_NEXT, Family.QWEN3_5_MOE]


def _cell(family: Family, layout: dict[str, Any], **training: Any) -> Cell:
    return Cell(family, {"training": {"lora": LORA, **training}, "parallelism": layout})


def _assert_like_reference(worlds: Worlds, lora_reference: Reference, cell: Cell) -> None:
    folder, expected = lora_reference(cell.family)
    within = WITHIN_OF_LINEAR_ATTENTION if cell.family in LINEAR else WITHIN
    assert_like(worlds.run(cell.ranks(), train_cell, cell, folder), expected, within=within)


@pytest.mark.parametrize(
    ("family", "layout"),
    make_rows(
        [*product(FAMILIES, LAYOUTS), *product(LINEAR, ("one rank", "TP2", "EP2", "PP2"))],
        [
            (Family.QWEN3_NEXT, "TP2"),
            (Family.QWEN3_5_MOE, "one rank"),
            *product((Family.QWEN3_MOE,), ("one rank", "PP2", "CP2", "TP2.EP2.ETP2 folded over TP2.DP2")),
            *product((Family.DEEPSEEK_V3,), ("PP2", "TP2.EP2.ETP2 folded over TP2.DP2")),
        ],
    ),
)
def test_adapters_train_as_the_merged_model_says(
    worlds: Worlds, lora_reference: Reference, family: Family, layout: str
) -> None:
    _assert_like_reference(worlds, lora_reference, _cell(family, LAYOUTS[layout]))


WRITTEN: dict[str, dict[str, Any]] = {
    "whole weights": {},
    "frozen weights divided": {"memory": {"sharding": "FSDP"}},
    "nodes of EP4": {"parallelism": {"expert": 4, "data": 1}, "resources": {"gpusPerNode": 2}},
}


@pytest.mark.parametrize("way", make_rows(WRITTEN, ("whole weights",)))
def test_adapters_train_alike_where_tokens_are_written_to_peers(
    worlds: Worlds, lora_reference: Reference, way: str
) -> None:
    cell = _cell(Family.QWEN3_MOE, {"expert": 2, "data": 2})
    sections = merge_sections({"moe": {"dispatcher": "Flex"}}, WRITTEN[way])
    _assert_like_reference(worlds, lora_reference, Cell(cell.family, merge_sections(cell.sections, sections)))


SHARED: dict[str, dict[str, Any]] = {
    "alone": {},
    "DP2": {"data": 2},
    # Three ranks divide nothing evenly.
    "DP3": {"data": 3},
    "TP2.DP2": {"tensor": 2, "data": 2},
    "EP2.DP2": {"expert": 2, "data": 2},
    "TP2.EP2.ETP2 folded over TP2.DP2": LAYOUTS["TP2.EP2.ETP2 folded over TP2.DP2"],
}


def _shared(family: Family, layout: dict[str, Any], sharding: str = "FSDP", **training: Any) -> Cell:
    cell = _cell(family, layout, **training)
    return Cell(family, merge_sections(cell.sections, {"memory": {"sharding": sharding}}))


@pytest.mark.parametrize(
    ("family", "layout"),
    make_rows(
        product(FAMILIES, SHARED),
        [
            *product((Family.QWEN3_MOE,), ("alone", "DP3", "TP2.EP2.ETP2 folded over TP2.DP2")),
            (Family.DEEPSEEK_V3, "EP2.DP2"),
        ],
    ),
)
def test_replicas_that_divide_the_frozen_weights_train_the_same_adapters(
    worlds: Worlds, lora_reference: Reference, family: Family, layout: str
) -> None:
    _assert_like_reference(worlds, lora_reference, _shared(family, SHARED[layout]))


GATHERED: dict[str, tuple[str, dict[str, Any]]] = {
    "gathered once a step": ("ZeRO2", {}),
    "layers recomputed": ("FSDP", {"recompute": {"granularity": "Full"}}),
    "experts again": ("FSDP", {"recompute": {"granularity": "Selective", "modules": ["Experts"]}}),
}


@pytest.mark.parametrize("way", make_rows(GATHERED, ("gathered once a step", "experts again")))
def test_divided_frozen_weights_are_gathered_in_every_way(worlds: Worlds, lora_reference: Reference, way: str) -> None:
    sharding, training = GATHERED[way]
    _assert_like_reference(
        worlds, lora_reference, _shared(Family.QWEN3_MOE, {"tensor": 2, "data": 2}, sharding, **training)
    )


def train_parameter_types(cell: Cell, folder: Path) -> tuple[list[float], set[tuple[bool, str]]]:
    """Train; return the losses, and which type the parameters of this rank have, by whether they are trained."""
    use_cpu()
    engine = start_engine(cell, folder)
    try:
        losses = [engine.update(micro_batches(cell, engine, n), make_loss(cell, engine)).loss for n in range(STEPS)]
        held = {(one.requires_grad, str(one.dtype)) for stage in engine.stages for one in stage.parameters()}
    finally:
        stop_groups()
    return losses, held


def test_frozen_shares_take_the_bytes_of_the_models_type(worlds: Worlds, lora_reference: Reference) -> None:
    folder, _ = lora_reference(Family.QWEN3_MOE)
    bfloat16 = {"model": {"dtype": "bfloat16"}}
    cells = [_cell(Family.QWEN3_MOE, {"data": 2}), _shared(Family.QWEN3_MOE, {"data": 2})]
    (whole, _), (shares, held) = (
        worlds.run(2, train_parameter_types, Cell(cell.family, merge_sections(cell.sections, bfloat16)), folder)[0]
        for cell in cells
    )
    assert held == {(True, "torch.float32"), (False, "torch.bfloat16")}
    assert shares == pytest.approx(whole, rel=5e-3)


def test_ranks_that_share_keys_and_values_share_their_adapter(worlds: Worlds, lora_reference: Reference) -> None:
    _assert_like_reference(worlds, lora_reference, _cell(Family.QWEN3_MOE, {"tensor": 4, "expert": 4, **FOLDED}))


@pytest.mark.parametrize("recompute", [{"granularity": "Full"}, {"granularity": "Selective", "modules": ["Experts"]}])
def test_adapters_train_the_same_when_layers_are_computed_again(
    worlds: Worlds, lora_reference: Reference, recompute: dict[str, Any]
) -> None:
    _assert_like_reference(
        worlds, lora_reference, _cell(Family.QWEN3_MOE, {"tensor": 2, "expert": 2, **FOLDED}, recompute=recompute)
    )


def test_nothing_but_adapters_is_updated(worlds: Worlds, lora_reference: Reference) -> None:
    folder, _ = lora_reference(Family.QWEN3_MOE)
    (names,) = worlds.run(1, update_parameters, _cell(Family.QWEN3_MOE, {}), folder)
    assert names
    assert all(name.endswith(("lora_a", "lora_b")) for name in names)


# --- how they begin and how they are published ----------------------------------------------------------------------


def build_fresh_adapters(cell: Cell, folder: Path) -> dict[str, torch.Tensor]:
    """New adapters, whole, on the rank that owns each."""
    use_cpu()
    engine = start_engine(cell, folder)
    try:
        lora, shape = engine.spec.training.lora, engine.model.shape
        assert lora is not None
        initialise_adapters(engine.stages, adapter_parameters(model_parameters(shape), lora), engine.groups, 42)
        state = whole_adapters(engine.stages)
        tensors = hugging_face_tensors(state, build_adapter_table(shape, lora), engine.placement.model_groups)
        return {name: tensor.clone() for name, tensor in tensors if not tensor.is_meta}
    finally:
        stop_groups()


@pytest.mark.parametrize("is_shared", [False, True], ids=["whole stages", "shares"])
def test_adapters_begin_alike_in_every_layout_and_add_nothing(
    worlds: Worlds, lora_reference: Reference, is_shared: bool
) -> None:
    folder, _ = lora_reference(Family.QWEN3_MOE)
    (expected,) = worlds.run(1, build_fresh_adapters, _cell(Family.QWEN3_MOE, {}), folder)
    layout = {"tensor": 2, "data": 2, "expert": 2, "expertTensor": 2, **FOLDED}
    made = _shared if is_shared else _cell
    found: dict[str, torch.Tensor] = {}
    for part in worlds.run(4, build_fresh_adapters, made(Family.QWEN3_MOE, layout), folder):
        found |= part
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=0)
        assert bool((tensor == 0).all()) is ("lora_B" in name)
        # Uniform up to one over the root of the inputs, as PEFT begins.
        if "lora_A" in name:
            reach = tensor.shape[1] ** -0.5
            assert 0.5 * reach < tensor.abs().max().item() <= reach


def export_own_adapters(cell: Cell, folder: Path, target: Path) -> dict[str, torch.Tensor]:
    """Exports the adapters; returns the merged weights that this rank owns."""
    use_cpu()
    engine = start_engine(cell, folder)
    try:
        lora = engine.spec.training.lora
        assert lora is not None
        place = AdapterTarget(target, "some/base", lora)
        adapted = build_adapter_table(engine.model.shape, lora)
        export_adapters(whole_adapters(engine.stages), adapted, engine.placement.model_groups, place)
        assert any("lora" in name for name in named_weights(engine.stages))
        return {name: tensor.clone() for name, tensor in engine.export_weights() if not tensor.is_meta}
    finally:
        stop_groups()


PUBLISHED = {
    "stages": _cell(Family.QWEN3_MOE, {"tensor": 2, "pipeline": 2, "expert": 2, **FOLDED}),
    "stages with latent attention": _cell(Family.DEEPSEEK_V3, {"tensor": 2, "pipeline": 2, "expert": 2, **FOLDED}),
    "shares": _shared(Family.QWEN3_MOE, {"tensor": 2, "data": 2, "expert": 2, **FOLDED}),
    "shares of three": _shared(Family.DEEPSEEK_V3, {"data": 3}),
}


@pytest.mark.parametrize("way", PUBLISHED)
def test_adapters_are_published_as_they_are_held(
    worlds: Worlds, lora_reference: Reference, way: str, tmp_path: Path
) -> None:
    cell = PUBLISHED[way]
    folder, _ = lora_reference(cell.family)
    parts = worlds.run(cell.ranks(), export_own_adapters, cell, folder, tmp_path / "adapters")
    written = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    held = load_file(folder / "adapters" / "model.safetensors")
    assert written.keys() == held.keys()
    assert all(written[name].equal(held[name].float()) for name in held)
    config = json.loads((tmp_path / "adapters" / "adapter_config.json").read_text())
    assert (config["r"], config["lora_alpha"], config["peft_type"]) == (RANK, ALPHA, "LORA")
    _expect_merged({name: tensor for part in parts for name, tensor in part.items()}, held, folder)


def _expect_merged(weights: dict[str, torch.Tensor], held: dict[str, torch.Tensor], folder: Path) -> None:
    """Expect that engines receive the base with its adapters added."""
    base = load_file(folder / "first" / "model.safetensors")
    assert weights.keys() == base.keys()
    for name, weight in base.items():
        expected = weight.double()
        module = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{module}.lora_A.weight" in held:
            expected = expected + ALPHA / RANK * held[f"{module}.lora_B.weight"] @ held[f"{module}.lora_A.weight"]
        torch.testing.assert_close(weights[name].double(), expected, rtol=1e-5, atol=1e-6, msg=name)


# --- masks and checkpoints ------------------------------------------------------------------------------------------


def test_what_is_computed_again_leaves_out_the_same_inputs(worlds: Worlds, lora_reference: Reference) -> None:
    folder, without = lora_reference(Family.QWEN3_MOE)
    half = {"lora": LORA | {"dropout": 0.5}}
    ways: tuple[dict[str, Any], ...] = ({}, {"recompute": {"granularity": "Full"}})
    first, again = (
        worlds.run(1, train_cell, Cell(Family.QWEN3_MOE, {"training": half | way}), folder)[0].steps for way in ways
    )
    assert abs(first.losses[0] - without.losses[0]) > 1e-3
    assert first.losses == pytest.approx(again.losses, rel=1e-6)
    assert first.norms == pytest.approx(again.norms, rel=1e-5)


def train_and_save(cell: Cell, folder: Path, checkpoint: Path) -> dict[str, int]:
    """Trains all steps but the last and saves; returns the counters."""
    use_cpu()
    engine = start_engine(cell, folder)
    try:
        for step in range(STEPS - 1):
            engine.update(micro_batches(cell, engine, step), make_loss(cell, engine))
        with ThreadPoolExecutor(1) as background:
            files = _files(engine, background)
            files.start_writing(checkpoint).writing.result()
            return dict(files.counters())
    finally:
        stop_groups()


def resume_last_step(cell: Cell, folder: Path, checkpoint: Path, counters: dict[str, int]) -> float:
    """The loss of the last step, trained from a checkpoint."""
    use_cpu()
    engine = start_engine(cell, folder)
    try:
        with ThreadPoolExecutor(1) as background:
            files = _files(engine, background)
            files.read(checkpoint, weights_only=False)
            files.set_counters(counters)
        return engine.update(micro_batches(cell, engine, STEPS - 1), make_loss(cell, engine)).loss
    finally:
        stop_groups()


def _files(engine: MegatronTrainingEngine, background: ThreadPoolExecutor) -> StateFiles:
    return StateFiles(engine, saved_parameters(model_parameters(engine.model.shape), engine.spec), background)


@pytest.mark.parametrize(
    "cell",
    [
        pytest.param(PUBLISHED["stages with latent attention"], id="stages"),
        pytest.param(_shared(Family.DEEPSEEK_V3, {"data": 3}), id="shares"),
    ],
)
def test_adapters_alone_are_saved_and_go_on_in_another_layout(
    worlds: Worlds, lora_reference: Reference, cell: Cell, tmp_path: Path
) -> None:
    folder, expected = lora_reference(Family.DEEPSEEK_V3)
    counters = worlds.run(cell.ranks(), train_and_save, cell, folder, tmp_path)[0]
    names = set()
    for path in tmp_path.glob("state-*.safetensors"):
        with safe_open(path, framework="pt") as file:
            names |= {box["name"] for box in json.loads(file.metadata()["boxes"])}
    assert all(name.endswith(("lora_a", "lora_b", "selection_bias")) for name in names)
    family, folded = Family.DEEPSEEK_V3, {"data": 2, "expertTensor": 2, **FOLDED}
    for other in (_cell(family, {}), _cell(family, folded), _shared(family, {"data": 2, "expert": 2})):
        losses = worlds.run(other.ranks(), resume_last_step, other, folder, tmp_path, counters)
        assert losses == pytest.approx([expected.losses[-1]] * other.ranks(), rel=WITHIN)
