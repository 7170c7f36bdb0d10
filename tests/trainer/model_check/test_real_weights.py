"""The check of a model on real weights, in the types that users train in: it accepts them, and sees small mistakes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from builders import merge_sections
from moejob_api.layout.sizes import derive_layout
from moejob_api.models.shape import Family
from moejob_api.problems import InvalidSpec
from moejob_trainer.conversion.adapters import AdapterTarget, build_adapter_table, export_adapters
from moejob_trainer.conversion.families import build_tensor_table
from moejob_trainer.conversion.model_export import ExportTarget, export_weights
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.topology import stop_groups
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine
from moejob_trainer.megatron.weights import adapter_weights, named_weights, whole_weights
from moejob_trainer.model_check.checks import ModelChecks
from real_models import DENSE, MIXTRAL, QWEN3_MOE, find_real_model
from trainer.conversion.published import values_of
from trainer.conversion.test_quantized import eighths
from trainer.parity.cells import Cell, make_loss, micro_batches, start_engine
from trainer.worlds import Worlds

FAMILIES = {DENSE: Family.LLAMA, MIXTRAL: Family.MIXTRAL, QWEN3_MOE: Family.QWEN3_MOE}
SAMPLED: dict[str, Any] = {"method": "GRPO", "grpo": {"temperature": 0.9, "rewards": [{"name": "exact-match"}]}}
RANK, ALPHA = 8, 16.0
MEGATRON: dict[str, Any] = {"model": {"implementation": "Megatron"}}
LORA: dict[str, Any] = {"training": {"lora": {"rank": RANK, "alpha": ALPHA}}}
TYPES = ("float32", "bfloat16")
LAYER = "7"


def _drop_tensor(engine: MegatronTrainingEngine) -> None:
    _down_projection(engine).zero_()


def _leave_norm(engine: MegatronTrainingEngine) -> None:
    _layer(engine).attention_norm.weight.data.fill_(1)


def _transpose_projection(engine: MegatronTrainingEngine) -> None:
    weight = _layer(engine).attention.output.weight.data
    hidden = engine.model.shape.hidden
    weight.copy_(weight.clone().view(hidden, hidden).t().reshape(weight.shape))


def _forget_scale(engine: MegatronTrainingEngine) -> None:
    """As if attention did not divide by the root of its heads' 64 dimensions."""
    _layer(engine).attention.query.weight.data.mul_(8)


def _move_vocabulary(engine: MegatronTrainingEngine) -> None:
    weight = engine.stages[0].embedding.weight.data
    weight.copy_(weight.roll(1, 0))


def _scale_vocabulary(engine: MegatronTrainingEngine) -> None:
    engine.stages[0].embedding.weight.data.mul_(1.01)


def _swap_experts(engine: MegatronTrainingEngine) -> None:
    down = _layer(engine).moe.experts.down.data
    down[[0, 1]] = down[[1, 0]]


def _layer(engine: MegatronTrainingEngine) -> Any:
    return engine.stages[0].layers[LAYER]


def _down_projection(engine: MegatronTrainingEngine) -> torch.Tensor:
    layer = _layer(engine)
    down: torch.Tensor = layer.moe.experts.down.data if hasattr(layer, "moe") else layer.mlp.down.weight.data
    return down


# What `model_check/tolerance.py` must see of a published model, in each type.
MISTAKES: Mapping[str, Callable[[MegatronTrainingEngine], None]] = {
    "a dropped tensor": _drop_tensor,
    "a norm left at one": _leave_norm,
    "a transposed projection": _transpose_projection,
    "a missing scale": _forget_scale,
    "tokens moved by one": _move_vocabulary,
    "an embedding 1 % too large": _scale_vocabulary,
    "two experts swapped": _swap_experts,
}
_OF_VOCABULARY = ("tokens moved by one", "an embedding 1 % too large")
_OF_EXPERTS = "two experts swapped"


def cell_of(name: str, dtype: str, sections: Mapping[str, Any]) -> Cell:
    return Cell(FAMILIES[name], merge_sections(sections, {"model": {"dtype": dtype}}))


def with_real_model(name: str, folder: Path) -> Path:
    """Lay the model where cells look for the weights that they start from."""
    (folder / "first").symlink_to(find_real_model(name))
    return folder


def refusal(act: Callable[[], object]) -> str:
    try:
        act()
    except (InvalidSpec, BadConfiguration) as refused:
        return str(refused)
    return ""


def import_refusals(cell: Cell, folder: Path, mistakes: Sequence[str] = ()) -> dict[str, str]:
    """Return the refusal of an import's check after no mistake, and after each of some."""
    use_cpu()
    engine = start_engine(cell, folder)
    checks = ModelChecks(engine, derive_layout(cell.spec().parallelism, 8), 0)
    right = {name: tensor.clone() for name, tensor in named_weights(engine.stages).items()}
    refusals = {}
    try:
        for name in ("", *mistakes):
            with torch.no_grad():
                if name:
                    MISTAKES[name](engine)
                refusals[name] = refusal(lambda: checks.check_import(folder / "first"))
                for place, tensor in named_weights(engine.stages).items():
                    tensor.copy_(right[place])
    finally:
        stop_groups()
    return refusals


def trained_and_exported(cell: Cell, folder: Path) -> str:
    """Return the refusal of an export's check after an update of all weights, or of adapters."""
    use_cpu()
    engine = start_engine(cell, folder)
    checks = ModelChecks(engine, derive_layout(cell.spec().parallelism, 8), 0)

    def act() -> None:
        engine.update(micro_batches(cell, engine, 0), make_loss(cell, engine))
        groups, base, lora = engine.placement.model_groups, folder / "first", engine.spec.training.lora
        if lora is None:
            target = ExportTarget(folder / "export", base, getattr(torch, engine.spec.model.dtype.value))
            export_weights(
                whole_weights(engine.stages),
                build_tensor_table(engine.model.shape),
                groups,
                target,
                checks.check_export,
            )
            return
        check = partial(checks.check_exported_adapters, base=base, scale=lora.alpha / lora.rank)
        adapters = AdapterTarget(folder / "export", str(base), lora)
        declared = build_adapter_table(engine.model.shape, lora)
        export_adapters(adapter_weights(engine.stages), declared, groups, adapters, check)

    try:
        return refusal(act)
    finally:
        stop_groups()


@pytest.mark.parametrize("dtype", TYPES)
def test_real_weights_are_accepted_at_another_temperature(worlds: Worlds, tmp_path: Path, dtype: str) -> None:
    folder = with_real_model(DENSE, tmp_path)
    assert worlds.run(1, import_refusals, cell_of(DENSE, dtype, SAMPLED), folder) == [{"": ""}]


@pytest.mark.parametrize(
    ("name", "dtype", "sections"),
    [
        pytest.param(DENSE, "float32", LORA, id="adapters in float32"),
        pytest.param(DENSE, "bfloat16", LORA, id="adapters in bfloat16"),
        pytest.param(DENSE, "float32", {}, id="all weights in float32"),
        pytest.param(
            QWEN3_MOE, "bfloat16", MEGATRON, id="Megatron's own mixture in bfloat16", marks=pytest.mark.thorough
        ),
        pytest.param(MIXTRAL, "float32", LORA, id="adapters on a mixture", marks=pytest.mark.thorough),
        pytest.param(MIXTRAL, "bfloat16", {}, id="a whole mixture in bfloat16", marks=pytest.mark.thorough),
        pytest.param(QWEN3_MOE, "bfloat16", LORA, id="adapters behind norms", marks=pytest.mark.thorough),
        pytest.param(QWEN3_MOE, "float32", SAMPLED, id="norms of queries in float32", marks=pytest.mark.thorough),
    ],
)
def test_what_was_trained_from_files_in_bfloat16_is_what_is_exported(
    worlds: Worlds, tmp_path: Path, name: str, dtype: str, sections: Mapping[str, Any]
) -> None:
    folder = with_real_model(name, tmp_path)
    assert worlds.run(1, trained_and_exported, cell_of(name, dtype, sections), folder) == [""]


def test_adapters_in_float32_on_weights_that_are_published_in_fp8_blocks_are_what_was_trained(
    worlds: Worlds, tmp_path: Path
) -> None:
    eighths(tmp_path / "first", values_of(Family.DEEPSEEK_V3, num_key_value_heads=8), (7, 5))
    assert worlds.run(1, trained_and_exported, Cell(Family.DEEPSEEK_V3, LORA), tmp_path) == [""]


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("name", [DENSE, pytest.param(MIXTRAL, marks=pytest.mark.thorough)])
def test_real_weights_are_accepted_and_each_mistake_is_refused_where_it_was_made(
    worlds: Worlds, tmp_path: Path, name: str, dtype: str
) -> None:
    # The mixture's experts are copies that differ by 2 %, and rounding to bfloat16 hides which is which.
    has_experts = name == MIXTRAL and dtype == "float32"
    mistakes = [mistake for mistake in MISTAKES if has_experts or mistake != _OF_EXPERTS]
    (refusals,) = worlds.run(1, import_refusals, cell_of(name, dtype, {}), with_real_model(name, tmp_path), mistakes)
    assert refusals.pop("") == ""
    for mistake, text in refusals.items():
        part = "the embedding" if mistake in _OF_VOCABULARY else f"layer {LAYER}"
        assert f"computes something else than Transformers: {part} (" in text, mistake


@pytest.mark.parametrize("dtype", TYPES)
def test_real_weights_that_are_turned_by_other_angles_are_refused(worlds: Worlds, tmp_path: Path, dtype: str) -> None:
    cell = replace(cell_of(DENSE, dtype, {}), mutant="theta 10000")
    (refusals,) = worlds.run(1, import_refusals, cell, with_real_model(DENSE, tmp_path))
    assert "computes something else than Transformers: layer " in refusals[""]
