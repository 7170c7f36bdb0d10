"""Memory of training steps on one GPU, phase by phase: what the estimate of `moejob plan` is compared with.

    python -m benchmarks.trainer.memory > tests/api/planner/memory/h200.jsonl

One line for each run: bytes that a layer keeps, peaks of forward and backward and of the update by torch's own
counters, and the whole device as the driver sees it.
"""

from __future__ import annotations

import argparse
import gc
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.trainer.engines import Started, join_ranks, loss, start_engine
from moejob_api.job import Spec
from moejob_api.models import catalog
from moejob_trainer.megatron.topology import stop_groups
from moejob_trainer.model.layer import TransformerLayer

# The first fills the optimizer's state and what is compiled once.
STEPS = 3
QWEN, MIXTRAL, LLAMA = "Qwen/Qwen3-30B-A3B", "mistralai/Mixtral-8x7B-v0.1", "meta-llama/Llama-3.1-8B"
MOONLIGHT, DEEPSEEK = "moonshotai/Moonlight-16B-A3B", "deepseek-ai/DeepSeek-V3"
ALL_EXPERTS: dict[str, Any] = {"first_k_dense_replace": 0}
# As much of it as one GPU holds.
SMALLER: dict[str, Any] = ALL_EXPERTS | {
    "n_routed_experts": 16,
    "vocab_size": 32000,
    "n_group": 1,
    "topk_group": 1,
    "num_nextn_predict_layers": 0,
}
BFLOAT16_GRADIENTS = {"gradients": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Run:
    """One step to measure: a model, cut to some layers, and what the job says of memory."""

    case: str
    model: str
    layers: int
    micro: int
    config: Mapping[str, Any] = field(default_factory=dict)
    sequence: int = 4096
    recompute: Mapping[str, Any] = field(default_factory=dict)
    precision: Mapping[str, str] = field(default_factory=dict)

    @property
    def whole_config(self) -> dict[str, Any]:
        """The config.json of the model."""
        return {**(catalog.find_config(self.model) or {}), **self.config, "num_hidden_layers": self.layers}

    def spec(self) -> Spec:
        """The job."""
        training = {
            "maxSteps": STEPS,
            "globalBatchSize": self.micro,
            "microBatchSize": self.micro,
            "recompute": self.recompute,
            "precision": self.precision,
        }
        job = {
            "method": "SFT",
            "model": {"source": self.model, "dtype": "bfloat16"},
            "data": {"train": [{"source": "/none.jsonl", "format": "Text"}], "maxLength": self.sequence},
            "training": training,
            "moe": {"balancing": "None"},
            "storage": {"size": "1Gi"},
            "resources": {"gpuType": "H200"},
        }
        return Spec.model_validate_json(json.dumps(job))


def _selective(*modules: str) -> dict[str, Any]:
    return {"granularity": "Selective", "modules": modules}


def _full(layers: int, method: str = "Uniform") -> dict[str, Any]:
    return {"granularity": "Full", "layers": layers, "method": method}


RUNS = (
    Run("qwen-l2-mb2", QWEN, 2, 2),
    Run("qwen-l4-mb1", QWEN, 4, 1),
    Run("qwen-l4-mb2", QWEN, 4, 2),
    Run("qwen-l4-mb4", QWEN, 4, 4),
    Run("qwen-l4-mb4-bf16grad", QWEN, 4, 4, precision=BFLOAT16_GRADIENTS),
    Run("qwen-l4-mb4-selective", QWEN, 4, 4, recompute={"granularity": "Selective"}),
    Run("qwen-l4-mb4-expert_input", QWEN, 4, 4, recompute=_selective("ExpertInput")),
    Run("qwen-l4-mb4-core_attn", QWEN, 4, 4, recompute=_selective("CoreAttention")),
    Run("qwen-l4-mb4-moe", QWEN, 4, 4, recompute=_selective("Experts")),
    Run("qwen-l4-mb4-full1", QWEN, 4, 4, recompute=_full(1)),
    Run("qwen-l4-mb4-full2", QWEN, 4, 4, recompute=_full(2)),
    Run("qwen-l4-mb4-block2", QWEN, 4, 4, recompute=_full(2, "Block")),
    Run("qwen-l4-mb1-seq16k", QWEN, 4, 1, sequence=16384),
    Run("qwen-l8-mb4-bf16grad", QWEN, 8, 4, precision=BFLOAT16_GRADIENTS),
    Run(
        "qwen-l8-mb4-bf16grad-bf16moments-selective",
        QWEN,
        8,
        4,
        recompute={"granularity": "Selective"},
        precision={"gradients": "bfloat16", "moments": "bfloat16"},
    ),
    Run("mixtral-l2-mb2", MIXTRAL, 2, 2),
    Run("mixtral-l2-mb2-selective", MIXTRAL, 2, 2, recompute={"granularity": "Selective"}),
    Run("llama8b-l4-mb2", LLAMA, 4, 2),
    Run("llama8b-l4-mb2-selective", LLAMA, 4, 2, recompute=_selective("Norms", "MLP")),
    Run("llama8b-l4-mb2-full1", LLAMA, 4, 2, recompute=_full(1)),
    Run("moonlight-l4-mb2", MOONLIGHT, 4, 2, ALL_EXPERTS),
    Run(
        "moonlight-l4-mb2-upproj",
        MOONLIGHT,
        4,
        2,
        ALL_EXPERTS,
        recompute=_selective("LatentUpProjection", "ExpertActivation", "Norms", "SharedExperts"),
    ),
    Run("dsv3-l2-mb1", DEEPSEEK, 2, 1, SMALLER),
    Run("dsv3-l2-mb1-upproj", DEEPSEEK, 2, 1, SMALLER, recompute=_selective("LatentUpProjection")),
    Run("dsv3-l2-mb1-full1", DEEPSEEK, 2, 1, SMALLER, recompute=_full(1)),
)


@dataclass(slots=True)
class Bytes:
    """Bytes that were counted in the last step."""

    layer: int = 0
    step: int = 0
    update: int = 0


def main() -> None:
    """Measure the runs, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", nargs="*", default=[run.case for run in RUNS], help="the runs of these cases alone")
    wanted, device = parser.parse_args().only, join_ranks()
    for run in RUNS:
        if run.case in wanted:
            print(json.dumps(_measure_run(run, device)), flush=True)
            stop_groups()
            gc.collect()
            torch.cuda.empty_cache()
    dist.destroy_process_group()


def _measure_run(run: Run, device: torch.device) -> dict[str, Any]:
    of_rank, random = start_engine(run.whole_config, run.spec(), device), np.random.default_rng(1)
    found = Bytes()
    for _ in range(STEPS):
        with _count_bytes(of_rank, found):
            of_rank.engine.update(of_rank.batch([run.sequence] * run.micro, random), loss)
    free, whole = torch.cuda.mem_get_info()
    return {
        "case": run.case,
        "model": run.model,
        "config": {**run.config, "num_hidden_layers": run.layers},
        "sequence": run.sequence,
        "micro": run.micro,
        "recompute": run.recompute,
        "precision": run.precision,
        "layerBytes": found.layer,
        "stepPeakBytes": found.step,
        "optimizerPeakBytes": found.update,
        "deviceBytes": whole - free,
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
    }


@contextmanager
def _count_bytes(of_rank: Started, found: Bytes) -> Iterator[None]:
    """Count while a step is made: what the first layer keeps, and both phases' peaks."""
    begins = list[int]()
    layers = [m for stage in of_rank.engine.stages for m in stage.modules() if isinstance(m, TransformerLayer)]
    hooks = [layer.register_forward_pre_hook(lambda *_: begins.append(_allocated_bytes())) for layer in layers[:2]]
    optimizer = of_rank.engine.optimizer
    norm = optimizer.gradient_norm

    def counted_norm() -> float:
        found.step = torch.cuda.max_memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        return norm()

    optimizer.gradient_norm = counted_norm  # type: ignore[method-assign]
    torch.cuda.reset_peak_memory_stats()
    yield
    del optimizer.gradient_norm
    found.update, found.layer = torch.cuda.max_memory_allocated(), begins[1] - begins[0]
    for hook in hooks:
        hook.remove()


def _allocated_bytes() -> int:
    return torch.cuda.memory_allocated()


if __name__ == "__main__":
    main()
