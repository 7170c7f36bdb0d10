"""Generation beside training: the same job synchronous and with staleness, as `moejob run` makes it.

    python -m benchmarks.rollout.ahead --out FOLDER --variants separate-0 separate-1
    MOEJOB_ROLLOUT_PYTHON=PYTHON python -m benchmarks.rollout.ahead --out FOLDER --accelerator GPU --variants ...

Weights are random and the vocabulary is small, so an answer ends at each token with about the same probability:
lengths are geometric, cut at `--answer-tokens`, and a few answers of a step are several times as long as the mean. The
variants run one after another on the same machine; each number is a mean over the steps behind the first ones.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from benchmarks.rollout.job_runs import RunLimits, log_tails, run_job

# Steps in which kernels are compiled and the queue of answers fills.
_WARM_UP_STEPS = 2
_PROMPT_TOKENS = 64
_SHARES = ("trainerWaitShare", "engineWaitShare", "stalenessMean", "staleness", "mismatchMean")
_PHASES = ("syncSeconds", "generateSeconds", "outputsSeconds", "learnSeconds", "releaseSeconds")
_POSITIONS = 40_960
_SMALL_SIZES = {
    "hidden_size": 128,
    "num_attention_heads": 4,
    "moe_intermediate_size": 128,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "max_position_embeddings": _POSITIONS,
}
_LARGE_SIZES = {
    "hidden_size": 2048,
    "num_attention_heads": 32,
    "moe_intermediate_size": 768,
    "num_experts_per_tok": 8,
    "max_position_embeddings": _POSITIONS,
}


class NoStepsError(RuntimeError):
    """A variant made no step behind the first ones."""


def main() -> int:
    """Run the variants, and print the means of each and the speed beside the first."""
    try:
        for summary in measure_variants(parse_options(sys.argv[1:])):
            sys.stdout.write(f"{json.dumps(summary)}\n")
            sys.stdout.flush()
    except NoStepsError as error:
        sys.stdout.write(f"{error}\n")
        return 1
    return 0


def measure_variants(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run one variant after the other, and yield the means of each and the speed beside the first.

    Raises:
        NoStepsError: A variant failed or took too long.
    """
    model = _write_model(options)
    seconds_of_first: float | None = None
    for variant in options.variants:
        placement, staleness, *cache = variant.split("-")
        job = _grpo_job(options, model, placement, int(staleness), cache)
        limits = RunLimits(options.seconds, options.steps)
        run = run_job(job, variant, (options.work / variant, options.out), options.gpus, limits)
        measured_steps = run.steps[_WARM_UP_STEPS:]
        if not measured_steps:
            raise NoStepsError(f"{variant}: exit {run.code}, {len(run.steps)} steps\n{log_tails(variant, options.out)}")
        summary = summarize_steps(measured_steps)
        seconds_of_first = seconds_of_first or summary["stepSeconds"]
        yield {"variant": variant, **summary, "speed": round(seconds_of_first / summary["stepSeconds"], 3)}


def parse_options(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse the options of a command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for logs and results")
    parser.add_argument("--work", type=Path, default=Path("/tmp/moejob-ahead"), help="folder of model and runs")
    parser.add_argument("--model", type=Path, help="folder of the model, written where it is missing")
    parser.add_argument("--variants", nargs="*", default=["separate-0", "separate-1", "separate-4", "colocated-0"])
    parser.add_argument("--accelerator", default="CPU", choices=["CPU", "GPU"])
    parser.add_argument("--gpus", default="0,1", help="as CUDA_VISIBLE_DEVICES names them")
    parser.add_argument("--gpu-type", default="H200")
    parser.add_argument("--layers", type=int, default=12, help="of the sizes of Qwen3-30B-A3B's, on GPUs")
    parser.add_argument("--experts", type=int, default=64, help="of a layer, on GPUs; half of the original's")
    parser.add_argument("--vocabulary", type=int, default=2048, help="tokens: about the mean length of an answer")
    parser.add_argument("--share", type=float, default=0.45, help="colocated engines' part of a GPU's memory")
    parser.add_argument(
        "--kl", type=float, default=0.0, help="weight of the penalty: above 0 a reference model computes"
    )
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--group", type=int, default=16)
    parser.add_argument("--answer-tokens", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=560, help="after these a run is ended")
    return parser.parse_args(arguments)


def _write_model(options: argparse.Namespace) -> Path:
    """Write random weights, those of Qwen3-30B-A3B's layers on GPUs; runs beside this one may share them."""
    import torch  # noqa: PLC0415  # the parser's help needs no torch

    from benchmarks.rollout.models import write_model  # noqa: PLC0415  # ditto

    folder: Path = options.model or options.work / "model"
    if (folder / "tokenizer_config.json").exists():
        return folder
    if options.accelerator == "CPU":
        write_model(folder, torch.float32, "cpu", vocab_size=options.vocabulary, **_SMALL_SIZES)
    else:
        sizes = _LARGE_SIZES | {"num_hidden_layers": options.layers, "num_experts": options.experts}
        write_model(folder, torch.bfloat16, "cuda", vocab_size=options.vocabulary, **sizes)
        torch.cuda.empty_cache()
    return folder


def _grpo_job(
    options: argparse.Namespace, model: Path, placement: str, staleness: int, cache: Sequence[str]
) -> dict[str, Any]:
    is_gpu, is_separate = options.accelerator == "GPU", placement == "separate"
    rollout: dict[str, Any] = {"placement": placement.capitalize(), "staleness": staleness}
    if is_separate:
        rollout["replicas"] = 1
    elif is_gpu:
        rollout["gpuMemoryUtilization"] = options.share
    if cache:
        rollout["cacheAcrossVersions"] = cache[0].capitalize()
    resources = {"gpuType": options.gpu_type, "gpusPerNode": 1} if is_gpu else {"accelerator": "CPU", "gpusPerNode": 1}
    return {
        "apiVersion": "moejob.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": {"name": "ahead"},
        "spec": {
            "method": "GRPO",
            "model": {"source": str(model), "dtype": "bfloat16" if is_gpu else "float32"},
            "data": {
                "train": [{"source": "moejob/tiny-sums", "format": "Prompts"}],
                "maxLength": options.answer_tokens + _PROMPT_TOKENS,
            },
            "training": {
                # Ended from outside: the last step of a run also saves.
                "maxSteps": 1000,
                "optimizer": {"learningRate": 1e-6},
                **({"precision": {"gradients": "bfloat16", "moments": "bfloat16"}} if is_gpu else {}),
            },
            "grpo": {
                "groupSize": options.group,
                "promptsPerStep": options.prompts,
                "maxNewTokens": options.answer_tokens,
                "kl": {"coefficient": options.kl},
                # Half of random texts end so: the answers of a group differ in their reward.
                "rewards": [{"name": "format", "pattern": "(?s).*[a-m]"}],
                "rollout": rollout,
            },
            "checkpoint": {"everySteps": 1000, "keep": 1, "exportHuggingFace": False},
            "storage": {"size": "2Ti"},
            "resources": resources,
        },
    }


def summarize_steps(steps: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return means over steps: seconds, those of each phase, shares of waiting, and tokens of answers a second.

    Not medians: where a step has waited long for its groups, those of the next step are often complete, too.
    """
    seconds = fmean(step["seconds"] for step in steps)
    return {
        "steps": len(steps),
        "stepSeconds": round(seconds, 3),
        "answerTokensPerSecond": round(fmean(step["answerTokens"] for step in steps) / seconds, 1),
        "answerLengthMean": round(fmean(step["answerLengthMean"] for step in steps), 1),
        "answerLengthMaximum": max(step["answerLengthMaximum"] for step in steps),
        **{name: round(fmean(step[name] for step in steps), 4) for name in (*_PHASES, *_SHARES)},
    }


if __name__ == "__main__":
    sys.exit(main())
