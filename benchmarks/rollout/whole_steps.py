"""Whole steps of GRPO of a published shape with random weights, as `moejob run` makes them: tokens a second and phases.

    MOEJOB_ROLLOUT_PYTHON=PYTHON python -m benchmarks.rollout.whole_steps --out FOLDER --gpus 4 --tensor 4

Nothing is learned, and answers end where they may not be longer: each has `--answer-tokens`. The run is killed behind
its last step, for the checkpoint of a large model has no room on most machines that are lent for an hour.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.rollout.job_runs import RunLimits, log_tails, run_job
from moejob_api.models import catalog

# The first step also pays for kernels that are compiled once.
_WARM_UP_STEPS = 1
_PROMPT_TOKENS = 384
_PHASES = ("syncSeconds", "generateSeconds", "outputsSeconds", "learnSeconds")
_NAME = "whole-steps"


def main() -> int:
    """Run the job, and print its steps and the median of those behind the first."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and results")
    parser.add_argument("--work", type=Path, default=Path("/tmp/moejob-whole-steps"), help="folder of model and run")
    parser.add_argument("--model", default="Qwen/Qwen3-30B-A3B")
    parser.add_argument("--gpus", type=int, default=4)
    parser.add_argument("--gpu-type", default="H200")
    parser.add_argument("--tensor", type=int, default=4, help="GPUs of an engine")
    parser.add_argument("--share", type=float, default=0.6, help="the engines' part of a GPU's memory")
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--answer-tokens", type=int, default=3072)
    parser.add_argument("--layers", type=int, help="instead of the model's own number")
    parser.add_argument("--recompute", default="None", choices=["None", "Selective", "Full"])
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=560, help="after these the run is ended")
    options = parser.parse_args()
    model = _write_shape(options.work / "model", options.model, options.layers)
    limits = RunLimits(options.seconds, options.steps)
    gpus = ",".join(map(str, range(options.gpus)))
    run = run_job(_grpo_job(options, model), _NAME, (options.work / "run", options.out), gpus, limits)
    for step in run.steps:
        _print_line(step)
    if len(run.steps) < options.steps:
        sys.stdout.write(
            f"exit {run.code}, {len(run.steps)} of {options.steps} steps\n{log_tails(_NAME, options.out)}\n"
        )
        return 1
    _print_line(_summary(run.steps[_WARM_UP_STEPS:], options.gpus))
    return 0


def _write_shape(folder: Path, name: str, layers: int | None) -> Path:
    """Write a config and a tokenizer without weights: the trainer makes those at random."""
    from moejob_trainer.data import tiny  # noqa: PLC0415  # the parser's help needs no torch

    config = dict(catalog.find_config(name) or {})
    tokenizer = tiny.build_tokenizer()
    ends = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    folder.mkdir(parents=True, exist_ok=True)
    sizes = {} if layers is None else {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps({**config, **ends, **sizes}))
    tokenizer.save_pretrained(folder)
    return folder


def _grpo_job(options: argparse.Namespace, model: Path) -> dict[str, Any]:
    return {
        "apiVersion": "moejob.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": {"name": _NAME},
        "spec": {
            "method": "GRPO",
            "model": {"source": str(model), "dtype": "bfloat16"},
            "data": {
                "train": [{"source": "moejob/tiny-sums", "format": "Prompts"}],
                "maxLength": options.answer_tokens + _PROMPT_TOKENS,
            },
            "parallelism": {"expert": options.gpus},
            "training": {
                # Ended from outside: the last step of a run also saves.
                "maxSteps": 1000,
                "optimizer": {"learningRate": 1e-6},
                "precision": {"gradients": "bfloat16", "moments": "bfloat16"},
                "recompute": {} if options.recompute == "None" else {"granularity": options.recompute},
            },
            "memory": {"offloadParameters": True, "offloadGradients": True},
            "grpo": {
                "groupSize": options.group,
                "promptsPerStep": options.prompts,
                "maxNewTokens": options.answer_tokens,
                "temperature": 0.9,
                # Half of random texts end so: the answers of a group differ in their reward.
                "rewards": [{"name": "format", "pattern": "(?s).*[a-m]"}],
                "rollout": {
                    "placement": "Colocated",
                    "sync": "IPC",
                    "tensor": options.tensor,
                    "gpuMemoryUtilization": options.share,
                },
            },
            "checkpoint": {"everySteps": 1000, "keep": 1, "exportHuggingFace": False},
            "storage": {"size": "2Ti"},
            "resources": {"gpuType": options.gpu_type, "gpusPerNode": options.gpus, "memory": "440Gi"},
        },
    }


def _summary(steps: Sequence[Mapping[str, Any]], gpus: int) -> dict[str, Any]:
    """Return medians of steps: seconds of each phase, and tokens of prompts and answers a second and GPU."""
    generated = [step["generatedTokens"] / step["seconds"] / gpus for step in steps]
    phases = {phase: round(median(step[phase] for step in steps), 3) for phase in _PHASES}
    return {
        "steps": len(steps),
        "stepSeconds": round(median(step["seconds"] for step in steps), 2),
        "generatedTokensPerSecondPerGpu": round(median(generated)),
        "tokensPerSecondPerGpu": round(median(step["tokensPerSecondPerGpu"] for step in steps)),
        **phases,
    }


def _print_line(line: Mapping[str, Any]) -> None:
    sys.stdout.write(f"{json.dumps(line)}\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
