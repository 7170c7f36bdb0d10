"""The layouts of GRPO that run on GPUs, and their jobs. Needs no GPU, so that a machine without one can plan them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.grpo_learning.jobs import Layout, Machine, Sizes, grpo_job
from benchmarks.grpo_learning.tasks import write_task

from real_models import DENSE, QWEN3_MOE
from real_models import MIXTRAL as MIXTURE

STEPS = 3


@dataclass(frozen=True)
class Case:
    """A layout of trainer and engines, and the GPUs it takes, as CUDA_VISIBLE_DEVICES names them."""

    model: str
    gpus: int
    parallelism: Mapping[str, int] = field(default_factory=dict)
    rollout: Mapping[str, Any] = field(default_factory=dict)
    visible: str | None = None
    implementation: str = "Auto"

    @property
    def engine_tensor(self) -> int:
        return int(self.rollout.get("tensor", 1))

    @property
    def is_colocated(self) -> bool:
        return str(self.rollout["placement"]) == "Colocated"


def colocated(tensor: int = 1) -> dict[str, Any]:
    return {"placement": "Colocated", "sync": "IPC", "tensor": tensor, "gpuMemoryUtilization": 0.4}


def separate(tensor: int = 1, sync: str = "NCCL", **more: Any) -> dict[str, Any]:
    return {"placement": "Separate", "sync": sync, "tensor": tensor, "replicas": 1, **more}


CASES = {
    "1 GPU, dense, colocated": Case(DENSE, 1, {}, colocated()),
    "1 GPU, mixture, colocated": Case(MIXTURE, 1, {}, colocated()),
    "1 GPU, mixture with head norms, colocated": Case(QWEN3_MOE, 1, {}, colocated()),
    # Trainer and engine take half of one GPU each.
    "1 GPU, mixture, files": Case(MIXTURE, 1, {}, separate(sync="Disk", gpuMemoryUtilization=0.4), "0,0"),
    "2 GPUs, dense, NCCL": Case(DENSE, 2, {}, separate()),
    "2 GPUs, mixture, NCCL": Case(MIXTURE, 2, {}, separate()),
    "2 GPUs, DP2, dense, colocated with an engine over 2": Case(DENSE, 2, {"data": 2}, colocated(2)),
    "2 GPUs, EP2, mixture, colocated with 2 engines": Case(MIXTURE, 2, {"expert": 2}, colocated()),
    "2 GPUs, EP2, mixture, colocated with an engine over 2": Case(MIXTURE, 2, {"expert": 2}, colocated(2)),
    "1 GPU, Megatron's mixture, colocated": Case(MIXTURE, 1, {}, colocated(), implementation="Megatron"),
    "2 GPUs, Megatron's mixture with head norms, NCCL": Case(QWEN3_MOE, 2, {}, separate(), implementation="Megatron"),
    "2 GPUs, EP2, Megatron's mixture, colocated with 2 engines": Case(
        MIXTURE, 2, {"expert": 2}, colocated(), implementation="Megatron"
    ),
    "3 GPUs, mixture, NCCL to an engine over 2": Case(MIXTURE, 3, {}, separate(2)),
    "4 GPUs, EP2, mixture, NCCL to an engine over 2": Case(MIXTURE, 4, {"expert": 2}, separate(2)),
    "4 GPUs, EP4, mixture, colocated with 2 engines over 2": Case(MIXTURE, 4, {"expert": 4}, colocated(2)),
    "4 GPUs, EP4, mixture, colocated with an engine over 4": Case(MIXTURE, 4, {"expert": 4}, colocated(4)),
    "4 GPUs, EP2 DP2, mixture with head norms, colocated with an engine over 4": Case(
        QWEN3_MOE, 4, {"data": 4, "expert": 2}, colocated(4)
    ),
    "6 GPUs, EP2, mixture, NCCL to an engine over 4": Case(MIXTURE, 6, {"expert": 2}, separate(4)),
    "8 GPUs, EP4, mixture, NCCL to an engine over 4": Case(MIXTURE, 8, {"expert": 4}, separate(4)),
}


def case_job(case: Case, model: Path, folder: Path, gpu_type: str) -> dict[str, Any]:
    """A job of few steps on sums, of which the model gets some right."""
    # A node has room for the trainer's ranks, and for a whole engine.
    trainers = case.gpus - (0 if case.is_colocated or case.visible else case.engine_tensor)
    machine = Machine(gpu_type, max(trainers, case.engine_tensor))
    sizes = Sizes(steps=STEPS, groups=16, members=8, answer_tokens=24, learning_rate=1e-5)
    job = grpo_job(model, write_task(folder / "task"), sizes, Layout(case.parallelism, case.rollout), machine)
    job["spec"]["model"]["implementation"] = case.implementation
    return job
