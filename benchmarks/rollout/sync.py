"""A few steps of GRPO in bfloat16 on GPUs, once for each way that weights can reach the engines.

The model is a Qwen3-MoE with random weights, so nothing is downloaded and nothing is learned: what counts is how long
a synchronization takes, how many bytes it moves, and how far the engines' log-probabilities are from the trainer's.

    python -m benchmarks.rollout.sync --out FOLDER [--cases colocated-ipc separate-disk ...] [--layers 8]

One GPU runs `separate-disk`, where engine and trainer take half of it each, and `colocated-ipc`. Two run the others.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.rollout.job_runs import RunLimits, log_tails, run_job

# vLLM's start, the trainer's, and the steps. Well below the ten minutes that a machine is often lent for.
_LIMITS = RunLimits(420)
_SHOWN = ("syncSeconds", "syncBytes", "probeMean", "probeMaximum", "generateSeconds", "outputsSeconds", "learnSeconds")
_MORE = (
    "mismatchMean",
    "mismatchMaximum",
    "generationTokensPerSecond",
    "reward",
    "loss",
    "gradNorm",
    "routingDisagreement",
)


@dataclass(frozen=True)
class Case:
    """One way for weights, and the GPUs as CUDA_VISIBLE_DEVICES calls them: the trainer's first."""

    rollout: Mapping[str, Any]
    gpus: str
    expert: int = 1
    replays: bool = False


CASES: Mapping[str, Case] = {
    "separate-disk": Case({"placement": "Separate", "sync": "Disk", "gpuMemoryUtilization": 0.4}, "0,0"),
    "colocated-ipc": Case({"placement": "Colocated", "sync": "IPC", "gpuMemoryUtilization": 0.4}, "0"),
    "separate-nccl": Case({"placement": "Separate", "sync": "NCCL", "gpuMemoryUtilization": 0.6}, "0,1"),
    "colocated-ipc-ep2": Case({"placement": "Colocated", "sync": "IPC", "gpuMemoryUtilization": 0.4}, "0,1", expert=2),
    "colocated-ipc-ep2-replay": Case(
        {"placement": "Colocated", "sync": "IPC", "gpuMemoryUtilization": 0.4}, "0,1", expert=2, replays=True
    ),
}


def main() -> int:
    """Run the cases that were asked for; the number of those that failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and results")
    parser.add_argument("--work", type=Path, default=Path("/tmp/moejob-sync"), help="folder for models and runs")
    parser.add_argument("--cases", nargs="+", choices=[*CASES], default=["separate-disk", "colocated-ipc"])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    model = _model(given.work / f"model-{given.layers}", given.layers)
    failed = [name for name in given.cases if not _ran(name, model, given.work, given.out, given.steps)]
    _say(f"failed: {failed}" if failed else "all cases ran")
    return len(failed)


def _model(folder: Path, layers: int) -> Path:
    """Write a model of 64 experts, unless it is there."""
    if folder.is_dir():
        return folder
    import torch  # noqa: PLC0415  # the parser's help needs none

    from benchmarks.rollout.models import write_model  # noqa: PLC0415

    write_model(
        folder,
        torch.bfloat16,
        "cuda" if torch.cuda.is_available() else "cpu",
        hidden_size=2048,
        intermediate_size=4096,
        moe_intermediate_size=768,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_experts=64,
        num_experts_per_tok=8,
        max_position_embeddings=4096,
    )
    return folder


def _job(case: Case, model: Path, steps: int) -> dict[str, Any]:
    ranks = case.expert
    return {
        "apiVersion": "moejob.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": {"name": "sync"},
        "spec": {
            "method": "GRPO",
            "model": {"source": str(model), "dtype": "bfloat16"},
            "data": {"train": [{"source": "moejob/tiny-sums", "format": "Prompts"}], "maxLength": 256},
            "parallelism": {"expert": case.expert},
            "training": {
                "maxSteps": steps,
                "optimizer": {"learningRate": 1e-5},
                # Answers are short: a few at a time would leave the GPU waiting for the host.
                "dynamicBatchTokens": 8192,
            },
            "grpo": {
                "groupSize": 8,
                "promptsPerStep": 16,
                "maxNewTokens": 128,
                "rewards": [{"name": "length"}],
                "rollout": dict(case.rollout),
                "routingReplay": case.replays,
            },
            "checkpoint": {"everySteps": 1000, "exportHuggingFace": False},
            "storage": {"size": "100Gi"},
            "resources": {"accelerator": "GPU", "gpuType": "H200", "gpusPerNode": ranks, "memory": "64Gi"},
        },
    }


def _ran(name: str, model: Path, work: Path, out: Path, steps: int) -> bool:
    begun = monotonic()
    _say(f"== {name}")
    run = run_job(_job(CASES[name], model, steps), name, (work / f"run-{name}", out), CASES[name].gpus, _LIMITS)
    for step in run.steps:
        _say(json.dumps({"case": name, "step": step.get("step")} | _pick_fields(step, (*_SHOWN, *_MORE))))
    _say(f"== {name}: exit {run.code}, {len(run.steps)} of {steps} steps, {monotonic() - begun:.0f} s")
    if run.code or len(run.steps) < steps:
        _say(log_tails(name, out))
        return False
    return True


def _pick_fields(step: Mapping[str, Any], names: Sequence[str]) -> dict[str, Any]:
    flat = {**step, **step.get("metrics", {})}
    return {name: flat[name] for name in names if name in flat}


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
