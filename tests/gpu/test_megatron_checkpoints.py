"""Megatron with Transformer Engine, as its users run it, loads what we export, and we import what it saves.

Transformer Engine is compiled for one version of torch, so it is part of no environment of ours; without it these tests
are skipped by name.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

# Products in float32 as they are written: TF32 is off by 1e-3. cuBLAS reads it when it is loaded.
os.environ |= {"NVIDIA_TF32_OVERRIDE": "0"}

import torch

pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine", exc_type=ImportError)
pytest.importorskip("megatron.bridge", reason="needs Megatron-Bridge")

import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.enums import AttnBackend
from safetensors.torch import load_file
from torch import Tensor, nn

from moejob_api.contract.pods import ExitCode
from moejob_api.models.shape import Family
from moejob_trainer.interchange.__main__ import main
from moejob_trainer.interchange.bridge_import import import_auto_bridge
from moejob_trainer.interchange.megatron_bridge import adapt_config, adapt_provider
from trainer.parity.cells import MEGATRON_NUMBERS, reference_model

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU here")]

FAMILIES = (
    Family.LLAMA,
    Family.QWEN3,
    Family.QWEN3_MOE,
    Family.GLM4_MOE,
    Family.DEEPSEEK_V3,
    Family.MIXTRAL,
    Family.QWEN2_MOE,
    Family.GPT_OSS,
)
# Logits are about 1. Kernels of attention and of grouped products add in an order of their own.
MOST_DIFFERENCE = 2e-4
PLAIN: dict[str, Any] = {
    # Of the kernels of attention only this one computes in float32.
    "attention_backend": AttnBackend.unfused,
    "params_dtype": torch.float32,
    "pipeline_dtype": torch.float32,
    "autocast_dtype": torch.float32,
    "bf16": False,
    "fp16": False,
    # Needs an extension of Apex.
    "gradient_accumulation_fusion": False,
    "moe_token_dispatcher_type": "alltoall",
    # The model has no such weights in its files.
    "mtp_num_layers": None,
}


@pytest.fixture(scope="module", autouse=True)
def _one_rank(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """The groups of Megatron over one GPU."""
    store = tmp_path_factory.mktemp("store") / "file"
    dist.init_process_group("nccl", init_method=f"file://{store}", rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


@pytest.mark.parametrize("family", FAMILIES)
def test_megatron_with_transformer_engine_computes_what_transformers_computes_from_an_export(
    family: Family, tmp_path: Path
) -> None:
    published, reference = publish_model(family, tmp_path)
    model = load_export(published, tmp_path / "megatron")
    tokens = torch.arange(3, 40, device="cuda")[None]
    with torch.no_grad():
        expected = reference.cuda()(tokens).logits
        found = model(tokens, torch.arange(tokens.shape[1], device="cuda")[None], None)
    assert expected.abs().max() > 0.1
    difference = (found - expected).abs().max().item()
    print(f"{family}: {difference:.1e} of {expected.abs().max().item():.2f}")  # noqa: T201 a result for the page
    assert difference < MOST_DIFFERENCE * expected.abs().max()


@pytest.mark.parametrize("family", FAMILIES)
def test_what_megatron_with_transformer_engine_saves_imports_to_the_same_tensors(
    family: Family, tmp_path: Path
) -> None:
    published, _ = publish_model(family, tmp_path)
    model = load_export(published, tmp_path / "megatron")
    saved = tmp_path / "saved"
    saved.mkdir()
    dist_checkpointing.save({"model": model.sharded_state_dict()}, str(saved))
    assert main(["import", str(saved), "--config", str(published), "--out", str(tmp_path / "back")]) == ExitCode.DONE
    back, there = (load_file(folder / "model.safetensors") for folder in (tmp_path / "back", published))
    assert back.keys() == there.keys()
    assert [name for name in there if not torch.equal(back[name], there[name])] == []


def publish_model(family: Family, folder: Path) -> tuple[Path, nn.Module]:
    reference = reference_model(family, **MEGATRON_NUMBERS.get(family, {})).eval()
    reference.save_pretrained(folder / "published")
    return folder / "published", reference


def build_model(published: Path) -> Any:
    """Megatron's model with the layers that it has where Transformer Engine is installed."""
    bridge = import_auto_bridge().from_hf_pretrained(published, torch_dtype=torch.float32)
    adapt_config(bridge.hf_pretrained.config)
    provider = bridge.to_megatron_provider(load_weights=False)
    for name, value in PLAIN.items():
        if hasattr(provider, name):
            setattr(provider, name, value)
    adapt_provider(provider, bridge.hf_pretrained.config)
    provider.finalize()
    model = provider.provide(pre_process=True, post_process=True).cuda().float().eval()
    assert any("transformer_engine" in type(module).__module__ for module in model.modules())
    return model


def load_export(published: Path, checkpoint: Path) -> Any:
    """Export a model, and load it into Megatron's; a parameter that the checkpoint lacks is no number."""
    assert main(["export", str(published), "--out", str(checkpoint)]) == ExitCode.DONE
    model = build_model(published)
    for parameter in model.parameters():
        parameter.data.fill_(torch.nan)
    loaded: dict[str, dict[str, Tensor]] = dist_checkpointing.load(
        {"model": model.sharded_state_dict()}, str(checkpoint / "iter_0000000")
    )
    model.load_state_dict(loaded["model"])
    return model
