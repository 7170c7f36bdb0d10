"""Reads a published model onto a GPU; prints what the check of the import says of it, and of one with a mistake.

python tests/gpu/published.py bfloat16
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "trainer" / "src"), str(ROOT / "crds" / "src"), str(ROOT / "tests")]

import torch  # noqa: E402 the trainer may lie there unpacked
import torch.distributed as dist  # noqa: E402
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel  # noqa: E402

from gpu.training import make_job  # noqa: E402
from moejob_api.layout.sizes import derive_layout as layout_of  # noqa: E402
from moejob_api.problems import InvalidSpec  # noqa: E402
from moejob_trainer.conversion.families import build_tensor_table  # noqa: E402
from moejob_trainer.conversion.loading import open_published_checkpoint  # noqa: E402
from moejob_trainer.megatron.stages import build_stages  # noqa: E402
from moejob_trainer.megatron.topology import start_groups, stop_groups  # noqa: E402
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine, TrainingPlacement  # noqa: E402
from moejob_trainer.megatron.weights import load_pretrained  # noqa: E402
from moejob_trainer.model.architecture import Architecture, read_architecture  # noqa: E402
from moejob_trainer.model_check.checks import ModelChecks  # noqa: E402

CONFIG: dict[str, Any] = {
    "model_type": "qwen3_moe",
    "hidden_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 64,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 384,
    "vocab_size": 8000,
    "norm_topk_prob": True,
    "rope_theta": 1e6,
    "initializer_range": 0.05,
}


def main(dtype: str) -> None:
    """Prints what is said and the seconds it took, as JSON."""
    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT=str(29650 + len(dtype)))
    dist.init_process_group("nccl")
    with tempfile.TemporaryDirectory() as folder:
        make_published_model(getattr(torch, dtype)).save_pretrained(folder)
        model = read_architecture(json.loads(Path(folder, "config.json").read_text()))
        mistaken = replace(model, rotary=replace(model.rotary, theta=1e4))
        started = time.monotonic()
        right = check_import(Path(folder), model, dtype)
        told = {
            "right": right,
            "seconds": time.monotonic() - started,
            "mistaken": check_import(Path(folder), mistaken, dtype),
        }
    print(json.dumps(told))  # noqa: T201
    dist.destroy_process_group()


def make_published_model(dtype: torch.dtype) -> PreTrainedModel:
    """A model as wide as those that people train, with norms that are not one."""
    torch.manual_seed(3)
    model: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(**CONFIG), dtype=dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(torch.randn_like(parameter) * 0.05)
    return model


def check_import(folder: Path, model: Architecture, dtype: str) -> str:
    """Return what the check says; nothing if all is well."""
    spec, device = make_job(dtype, "cuda"), torch.device("cuda")
    layout = layout_of(spec.parallelism, 8)
    groups = start_groups(layout, spec.moe.dispatcher)
    stages = build_stages(model, spec, layout, groups, device)
    load_pretrained(stages, open_published_checkpoint(folder, build_tensor_table(model.shape)), groups)
    engine = MegatronTrainingEngine(model, spec, stages, TrainingPlacement(groups, device), lambda _: 1e-3)
    try:
        ModelChecks(engine, layout, node=0).check_import(folder)
    except InvalidSpec as refused:
        return str(refused)
    finally:
        stop_groups()
    return ""


if __name__ == "__main__":
    main(sys.argv[1])
