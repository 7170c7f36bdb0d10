"""PEFT itself reads the adapters that we publish, and says with them what the merged model says."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from moejob_api.models.shape import Family
from moejob_trainer.conversion.adapters import AdapterTarget, build_adapter_table, export_adapters
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.topology import stop_groups
from moejob_trainer.megatron.weights import adapter_weights
from moejob_trainer.model.architecture import read_architecture
from trainer.parity.cells import Cell, reference_model, start_engine
from trainer.rows import make_rows
from trainer.worlds import Worlds

ROOT = Path(__file__).parents[3]
PYTHON = ROOT / ".venv/peft/bin/python"
FOLDED: dict[str, Any] = {"expertLayout": "Folded"}
ATTENTION = ("QueryKeyValue", "AttentionOutput")
EXPERTS = ("ExpertGateUp", "ExpertDown")
DENSE = ("GateUp", "Down")
ALL = (*ATTENTION, *DENSE, *EXPERTS)
# Qwen2-MoE, DeepSeek and GLM have dense layers or shared experts beside the others.
CASES = {
    "qwen3_moe, attention": (Family.QWEN3_MOE, ATTENTION),
    "qwen3_moe, experts": (Family.QWEN3_MOE, (*ATTENTION, *EXPERTS)),
    "qwen3_moe, down of experts": (Family.QWEN3_MOE, EXPERTS[1:]),
    "mixtral, experts": (Family.MIXTRAL, (*ATTENTION, *EXPERTS)),
    "qwen2_moe, all": (Family.QWEN2_MOE, ALL),
    "qwen3_next, all": (Family.QWEN3_NEXT, ALL),
    "qwen3_5_moe, all": (Family.QWEN3_5_MOE, ALL),
    "deepseek_v2, attention": (Family.DEEPSEEK_V2, ATTENTION),
    "deepseek_v3, shared": (Family.DEEPSEEK_V3, DENSE),
    "deepseek_v3, experts": (Family.DEEPSEEK_V3, EXPERTS),
    "deepseek_v3, all": (Family.DEEPSEEK_V3, ALL),
    "glm4_moe, all": (Family.GLM4_MOE, ALL),
    "olmoe, all": (Family.OLMOE, (*ATTENTION, *EXPERTS)),
    "ernie4_5_moe, all": (Family.ERNIE4_5_MOE, ALL),
    "minimax_m2, all": (Family.MINIMAX_M2, (*ATTENTION, *EXPERTS)),
    "gpt_oss, attention": (Family.GPT_OSS, ATTENTION),
    "llama, all": (Family.LLAMA, (*ATTENTION, *DENSE)),
}
# Every kind of module, and a family whose names differ.
ALWAYS = ("qwen3_moe, experts", "mixtral, experts", "qwen2_moe, all", "deepseek_v3, all")


def export_own_adapters(cell: Cell, folder: Path) -> dict[str, torch.Tensor]:
    """Exports the adapters; returns the merged weights that this rank owns."""
    use_cpu()
    engine = start_engine(cell, folder)
    try:
        lora, base = engine.spec.training.lora, folder / "first"
        assert lora is not None
        adapted = build_adapter_table(engine.model.shape, lora)
        target = AdapterTarget(folder / "published", str(base), lora)
        export_adapters(adapter_weights(engine.stages), adapted, engine.placement.model_groups, target)
        return {name: tensor.clone() for name, tensor in engine.export_weights() if not tensor.is_meta}
    finally:
        stop_groups()


@pytest.fixture(scope="module")
def said(
    worlds: Worlds, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, dict[str, torch.Tensor]]:
    """The logits of each case that is run: of the base, of the merged model, and of the base as PEFT adapts it."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function) and item.path == request.path]
    folders = {str(item.callspec.params["case"]): tmp_path_factory.mktemp("peft") for item in items}
    for name, folder in folders.items():
        _export_for_peft(worlds, *CASES[name], folder)
    script = Path(__file__).with_name("peft_logits.py")
    done = subprocess.run([PYTHON, script, *folders.values()], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: load_file(folder / "logits.safetensors") for name, folder in folders.items()}


@pytest.mark.parametrize("case", make_rows(CASES, ALWAYS))
def test_peft_says_with_our_adapters_what_the_merged_model_says(
    said: dict[str, dict[str, torch.Tensor]], case: str
) -> None:
    first, merged, adapted = (said[case][name] for name in ("first", "merged", "adapted"))
    assert (first - merged).abs().max().item() > 0.1
    assert (adapted - merged).abs().max().item() < 1e-5 * merged.abs().max().item()


def _export_for_peft(worlds: Worlds, family: Family, targets: tuple[str, ...], folder: Path) -> None:
    lora = {"rank": 4, "alpha": 6.0, "dropout": 0.5, "targets": targets}
    cell = Cell(family, {"training": {"lora": lora}, "parallelism": {"data": 2, "tensor": 2, **FOLDED}})
    _write_model(cell, folder)
    (folder / "merged").mkdir()
    parts = worlds.run(4, export_own_adapters, cell, folder)
    merged = {name: tensor.contiguous() for part in parts for name, tensor in part.items()}
    save_file(merged, folder / "merged/model.safetensors", {"format": "pt"})
    (folder / "merged/config.json").write_text((folder / "first/config.json").read_text())


def _write_model(cell: Cell, folder: Path) -> None:
    """A model, and adapters of which no part is zero."""
    model, lora = reference_model(cell.family), cell.spec().training.lora
    assert lora is not None
    model.save_pretrained(folder / "first")
    config = (folder / "first/config.json").read_text()
    table = build_adapter_table(read_architecture(json.loads(config)).shape, lora)
    generator = torch.Generator().manual_seed(11)
    (folder / "adapters").mkdir()
    (folder / "adapters/config.json").write_text(config)
    tensors = {piece.tensor: torch.randn(piece.shape, generator=generator) * 0.2 for piece in table.pieces}
    save_file(tensors, folder / "adapters/model.safetensors")
