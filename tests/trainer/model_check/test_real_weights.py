"""The check of a model on real weights, in the types that users train in: it accepts them, and sees small mistakes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from moejob_api.layout.sizes import layout
from moejob_api.models.shape import Family
from moejob_api.problems import InvalidSpec
from moejob_trainer.conversion.adapters import AdapterTarget, adapter_table, export_adapters
from moejob_trainer.conversion.families import table
from moejob_trainer.conversion.model_export import Target, export
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.engine import MegatronEngine
from moejob_trainer.megatron.topology import stop_groups
from moejob_trainer.megatron.weights import adapter_weights, whole_weights
from moejob_trainer.model_check.checks import Checks
from real_models import DENSE, MIXTRAL, find_real_model
from trainer.conversion.published import values_of
from trainer.conversion.test_quantized import eighths, fours
from trainer.parity.cells import Cell, loss_of, micro_batches, started
from trainer.worlds import Worlds

FAMILIES = {DENSE: Family.LLAMA, MIXTRAL: Family.MIXTRAL}
SAMPLED: dict[str, Any] = {"method": "GRPO", "grpo": {"temperature": 0.9, "rewards": [{"name": "exact-match"}]}}
RANK, ALPHA = 8, 16.0
LORA: dict[str, Any] = {"training": {"lora": {"rank": RANK, "alpha": ALPHA}}}
TYPES = ("float32", "bfloat16")


def cell_of(name: str, dtype: str, sections: Mapping[str, Any]) -> Cell:
    return Cell(FAMILIES[name], {**sections, "model": {"dtype": dtype}})


def with_real_model(name: str, folder: Path) -> Path:
    """Lay the model where cells look for the weights that they start from."""
    (folder / "first").symlink_to(find_real_model(name))
    return folder


def refusal(cell: Cell, folder: Path, act: Callable[[MegatronEngine, Checks], object]) -> str:
    use_cpu()
    engine = started(cell, folder)
    try:
        act(engine, Checks(engine, layout(cell.spec().parallelism, 8), 0))
    except (InvalidSpec, BadConfiguration) as refused:
        return str(refused)
    finally:
        stop_groups()
    return ""


def imported(cell: Cell, folder: Path) -> str:
    """Return the refusal of an import's check."""
    return refusal(cell, folder, lambda _, checks: checks.imported(folder / "first"))


def trained_and_exported(cell: Cell, folder: Path) -> str:
    """Return the refusal of an export's check after an update of all weights, or of adapters."""

    def act(engine: MegatronEngine, checks: Checks) -> None:
        engine.update(micro_batches(cell, engine, 0), loss_of(cell, engine))
        groups, base, lora = engine.placement.model_groups, folder / "first", engine.spec.training.lora
        if lora is None:
            target = Target(folder / "export", base, getattr(torch, engine.spec.model.dtype.value))
            export(whole_weights(engine.stages), table(engine.model.shape), groups, target, checks.exported)
            return
        check = partial(checks.exported_adapters, base=base, scale=lora.alpha / lora.rank)
        adapters = AdapterTarget(folder / "export", str(base), lora)
        declared = adapter_table(engine.model.shape, lora)
        export_adapters(adapter_weights(engine.stages), declared, groups, adapters, check)

    return refusal(cell, folder, act)


@pytest.mark.parametrize("dtype", TYPES)
def test_real_weights_are_accepted_at_another_temperature(worlds: Worlds, tmp_path: Path, dtype: str) -> None:
    folder = with_real_model(DENSE, tmp_path)
    assert worlds.run(1, imported, cell_of(DENSE, dtype, SAMPLED), folder) == [""]


@pytest.mark.parametrize(
    ("name", "dtype", "sections"),
    [
        pytest.param(DENSE, "float32", LORA, id="adapters in float32"),
        pytest.param(DENSE, "bfloat16", LORA, id="adapters in bfloat16"),
        pytest.param(DENSE, "float32", {}, id="all weights in float32"),
        pytest.param(MIXTRAL, "float32", LORA, id="adapters on a mixture", marks=pytest.mark.thorough),
        pytest.param(MIXTRAL, "bfloat16", {}, id="a whole mixture in bfloat16", marks=pytest.mark.thorough),
    ],
)
def test_what_was_trained_from_files_in_bfloat16_is_what_is_exported(
    worlds: Worlds, tmp_path: Path, name: str, dtype: str, sections: Mapping[str, Any]
) -> None:
    folder = with_real_model(name, tmp_path)
    assert worlds.run(1, trained_and_exported, cell_of(name, dtype, sections), folder) == [""]


def test_adapters_in_float32_on_experts_that_are_published_packed_are_what_was_trained(
    worlds: Worlds, tmp_path: Path
) -> None:
    fours(tmp_path / "first", values_of(Family.GPT_OSS, hidden_size=64, intermediate_size=64))
    lora = {"training": {"lora": {"rank": RANK, "targets": ["QueryKeyValue", "AttentionOutput"]}}}
    assert worlds.run(1, trained_and_exported, Cell(Family.GPT_OSS, lora), tmp_path) == [""]


def test_adapters_in_float32_on_weights_that_are_published_in_fp8_blocks_are_what_was_trained(
    worlds: Worlds, tmp_path: Path
) -> None:
    eighths(tmp_path / "first", values_of(Family.DEEPSEEK_V3, num_key_value_heads=8), (7, 5))
    assert worlds.run(1, trained_and_exported, Cell(Family.DEEPSEEK_V3, LORA), tmp_path) == [""]
