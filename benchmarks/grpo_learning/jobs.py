"""Jobs of GRPO that train a model folder on a task, on GPUs or on the CPU. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.grpo_learning.tasks import Task

# What users set; a model's own temperature is what 1 would be.
TEMPERATURE = 0.9


@dataclass(frozen=True, slots=True)
class Machine:
    """The processors that a job asks for."""

    # Absent: the CPU.
    gpu_type: str | None = None
    gpus_per_node: int = 1
    memory: str = "64Gi"

    def resources(self) -> dict[str, Any]:
        """Return the section of the job."""
        if self.gpu_type is None:
            return {"accelerator": "CPU", "cpu": 1, "memory": "8Gi", "sharedMemory": "1Gi", "gpusPerNode": 1}
        return {
            "accelerator": "GPU",
            "gpuType": self.gpu_type,
            "gpusPerNode": self.gpus_per_node,
            "memory": self.memory,
            "sharedMemory": "8Gi",
        }


@dataclass(frozen=True, slots=True)
class Sizes:
    """The part of a task that a job learns, and its speed."""

    steps: int = 60
    groups: int = 32
    members: int = 8
    answer_tokens: int = 32
    learning_rate: float = 3e-6
    seed: int = 1
    dtype: str = "bfloat16"


@dataclass(frozen=True, slots=True)
class Layout:
    """The ranks of the trainer, and the engines."""

    parallelism: Mapping[str, int] = field(default_factory=dict)
    rollout: Mapping[str, Any] = field(default_factory=lambda: {"placement": "Colocated", "gpuMemoryUtilization": 0.4})


def grpo_job(model: Path, task: Task, sizes: Sizes, layout: Layout, machine: Machine) -> dict[str, Any]:
    """Return the job as the file of `moejob run` has it."""
    return {
        "apiVersion": "moejob.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": {"name": "learning"},
        "spec": {
            "method": "GRPO",
            "model": {"source": str(model), "dtype": sizes.dtype},
            "data": {"train": [{"source": str(task.prompts), "format": "Prompts"}], "maxLength": 256},
            "parallelism": dict(layout.parallelism),
            "training": {
                "maxSteps": sizes.steps,
                "seed": sizes.seed,
                "optimizer": {"learningRate": sizes.learning_rate, "weightDecay": 0},
                "scheduler": {"kind": "Constant", "warmupSteps": min(5, sizes.steps - 1)},
                # Answers are short: a few at a time would leave a GPU waiting for the host.
                "dynamicBatchTokens": 8192 if machine.gpu_type else 512,
            },
            "grpo": {
                "groupSize": sizes.members,
                "promptsPerStep": sizes.groups,
                "maxNewTokens": sizes.answer_tokens,
                "temperature": TEMPERATURE,
                "rewards": [dict(task.reward)],
                "rollout": dict(layout.rollout),
            },
            "checkpoint": {"everySteps": 1000, "exportHuggingFace": True},
            "storage": {"size": "100Gi"},
            "resources": machine.resources(),
        },
    }


def write_job(job: Mapping[str, Any], file: Path) -> Path:
    """Write a job as JSON, which is YAML."""
    file.write_text(json.dumps(job, indent=1), encoding="utf-8")
    return file
