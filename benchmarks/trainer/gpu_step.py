"""Training steps of one shape on the GPUs of this machine: tokens per second, TFLOP/s and memory.

    python -m benchmarks.trainer.gpu_step --micro 4 --accumulate 4
    torchrun --nproc-per-node 4 -m benchmarks.trainer.gpu_step --expert 4 --layers 24 --dispatcher Flex
    torchrun --nproc-per-node 2 --max-restarts 9 -m benchmarks.trainer.gpu_step --data 2 --case="--layers 8" \\
        --case="--layers 8 --sharding FSDP" --cases FILE

    python -m benchmarks.trainer.gpu_step --micro 2 --case="" --case="--implementation Megatron"

Random tokens, real routing unless a case says --balanced, nothing dropped; a whole step with clipping and Adam. Prints
one JSON line for each case as soon as it is there, beside what `moejob plan` expects of it. A case takes what it does
not say from the options around it; FILE has a case in each line.
"""

from __future__ import annotations

import argparse
import json
import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.trainer.engines import Started, loss, peak_gib, resources, stack, start_engine, synchronize
from benchmarks.trainer.in_turn import Line, in_turn
from moejob_api.hardware import job_hardware
from moejob_api.job import Spec
from moejob_api.job.parallelism import ExpertLayout, Parallelism
from moejob_api.layout.sizes import derive_layout
from moejob_api.models import catalog
from moejob_api.planner.cost.estimate import model_flops, step_cost
from moejob_api.planner.memory import estimate_memory
from moejob_trainer.layers.kernels import attention
from moejob_trainer.training import UpdateResult

STEPS, WARM = 8, 3
# A step takes seconds, and kernels for a new shape some more.
_CASE_SECONDS = 240
OVERLAPS: Mapping[str, Mapping[str, bool]] = {
    "all": {"overlapParameterGather": True, "overlapOptimizerCopies": True},
    "sums": {},
    "none": {"overlapGradientReduction": False},
}


def main() -> None:
    """Measures and prints."""
    cases = _cases()
    in_turn(
        [case_name(case) for case in cases], lambda number, device: measure_case(cases[number], device), _CASE_SECONDS
    )


def measure_case(chosen: argparse.Namespace, device: torch.device) -> Line:
    """Make some steps of a case, and return the line of it."""
    config = dict(catalog.find_config(chosen.model) or {}) | {"num_hidden_layers": chosen.layers}
    begun = time.perf_counter()
    of_rank = start_engine(config, job(chosen, device), device)
    random, seconds, result = np.random.default_rng(1), [], None
    built_seconds = time.perf_counter() - begun
    for _ in range(STEPS):
        batch = of_rank.batch(_lengths(chosen, of_rank, random), random, is_balanced=chosen.balanced)
        synchronize(device)
        begun = time.perf_counter()
        result = of_rank.engine.update(batch, loss)
        synchronize(device)
        seconds.append(time.perf_counter() - begun)
    if chosen.profile:
        _profile(lambda: of_rank.engine.update(batch, loss))
    if result is None:
        raise ValueError(f"{STEPS} steps make no result")
    about = _measured_numbers(chosen, of_rank, result, seconds[WARM:])
    starting = {"builtSeconds": round(built_seconds, 1), "firstStepSeconds": round(seconds[0], 1)}
    return {**about, **starting, "peakGiB": peak_gib(device), **expected_numbers(of_rank), **stack(device)}


def expected_numbers(of_rank: Started) -> dict[str, float]:
    """Return what the planner says of this job: the seconds of a step, and the memory of the fullest GPU."""
    spec, shape, sizes = of_rank.spec, of_rank.model.shape, of_rank.sizes
    return {
        "expectedSeconds": round(step_cost(spec, shape, sizes, job_hardware(spec.resources)).seconds, 4),
        "expectedGiB": round(estimate_memory(spec, shape, sizes).bytes / 2**30, 1),
    }


def _lengths(chosen: argparse.Namespace, of_rank: Started, random: np.random.Generator) -> list[int]:
    count = chosen.micro * chosen.accumulate * of_rank.sizes.data * chosen.per_row
    if chosen.uneven:
        return [int(length) for length in random.integers(chosen.length // 2, chosen.length, count)]
    return [chosen.length] * count


def _profile(step: Callable[[], object]) -> None:
    """Return where the time of one step goes, kernel by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=45, max_name_column_width=90))


def _measured_numbers(
    chosen: argparse.Namespace, of_rank: Started, result: UpdateResult, seconds: list[float]
) -> dict[str, object]:
    step = float(np.median(seconds))
    ranks = dist.get_world_size()
    flops = result.tokens * model_flops(of_rank.model.shape, chosen.length)
    return {
        "case": vars(chosen) | {"attention": attention_here()},
        "tokensPerSecondPerGpu": round(result.tokens / step / ranks),
        "teraflops": round(flops / step / ranks / 1e12, 1),
        "secondsPerStep": round(step, 4),
        "loss": round(result.loss, 4),
        "gradNorm": round(result.gradient_norm, 4),
    }


def attention_here() -> str:
    """Return which attention steps have. flash-attn-4 beside other versions of what it is built on does not work."""
    if not torch.cuda.is_available():
        return "cuDNN"
    head = torch.empty(1, 1, 128, dtype=torch.bfloat16, device="cuda")
    return "flash-attn-4" if attention.can_use_flash(head, head) else "cuDNN"


def job(chosen: argparse.Namespace, device: torch.device) -> Spec:
    """Return the job of a case."""
    parallelism = _parallelism(chosen)
    # Of each replica; the options say how many micro batches one of them makes.
    batch = chosen.micro * chosen.accumulate * derive_layout(Parallelism.model_validate(parallelism), 8).data
    return Spec.model_validate_json(
        json.dumps(
            {
                "method": "SFT",
                "model": {"source": chosen.model, "dtype": "bfloat16", "implementation": chosen.implementation},
                "data": {
                    "train": [{"source": "/none.jsonl", "format": "Text"}],
                    "maxLength": chosen.length * chosen.per_row,
                },
                "parallelism": parallelism,
                "training": {
                    "maxSteps": STEPS,
                    "globalBatchSize": batch,
                    "microBatchSize": chosen.micro,
                    "precision": {
                        "compute": chosen.compute,
                        "gradients": chosen.gradients,
                        "moments": chosen.moments,
                    },
                    "recompute": {"granularity": chosen.recompute, "modules": chosen.modules},
                    "communication": OVERLAPS[chosen.overlaps],
                },
                "moe": {"balancing": "None", "dispatcher": chosen.dispatcher},
                "memory": {
                    "sharding": chosen.sharding,
                    "offloadOptimizer": chosen.offload,
                    "offloadActivations": chosen.activations,
                },
                "storage": {"size": "1Gi"},
                "resources": resources(device),
            }
        )
    )


def _parallelism(chosen: argparse.Namespace) -> dict[str, object]:
    sizes = {name: getattr(chosen, name) for name in ("tensor", "pipeline", "expert", "context", "data")}
    if not chosen.folded:
        return sizes
    return {**sizes, "expertLayout": ExpertLayout.FOLDED, "expertTensor": chosen.expert_tensor}


def _cases() -> list[argparse.Namespace]:
    whole = parser()
    asked = whole.add_argument_group("several cases")
    asked.add_argument("--case", action="append", default=[], metavar="OPTIONS", help="once for each, as --case='...'")
    asked.add_argument("--cases", type=Path, metavar="FILE", help="more of them, one a line")
    chosen = vars(whole.parse_args())
    texts, file = chosen.pop("case"), chosen.pop("cases")
    texts += [] if file is None else file.read_text().splitlines()
    return parsed_cases(texts, argparse.Namespace(**chosen))


def parsed_cases(texts: Sequence[str], around: argparse.Namespace) -> list[argparse.Namespace]:
    """Return the cases that are written so, each with the options around it where it has none of its own."""
    written = [shlex.split(text, comments=True) for text in texts]
    cases = [parser().parse_args(options, argparse.Namespace(**vars(around))) for options in written if options]
    return cases or [around]


def case_name(chosen: argparse.Namespace) -> str:
    """Return the options of a case that are not as they are by default."""
    usual = vars(parser().parse_args([]))
    return " ".join(f"{name}={value}" for name, value in vars(chosen).items() if value != usual[name])


def parser() -> argparse.ArgumentParser:
    """Return the options of one case."""
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    options.add_argument("--model", default="Qwen/Qwen3-30B-A3B")
    options.add_argument("--implementation", default="Native", help="Native, or Megatron: GPTModel of Megatron-Core")
    options.add_argument("--compute", help="FP8; the model's type without")
    options.add_argument("--gradients", default="float32")
    options.add_argument("--moments", default="float32")
    options.add_argument("--recompute", default="None")
    options.add_argument("--modules", nargs="*", default=[], help="of --recompute Selective; its own choice without")
    options.add_argument("--sharding", default="DistributedOptimizer")
    options.add_argument("--dispatcher", default="AllToAll", help="AllToAll, AllGather or Flex")
    options.add_argument("--overlaps", choices=[*OVERLAPS], default="sums", help="exchanges beside the computation")
    options.add_argument("--offload", type=float, default=0.0, help="share of the optimizer in host memory")
    options.add_argument("--activations", action="store_true", help="kept in host memory between the passes")
    options.add_argument("--folded", action="store_true", help="--expert divides the GPUs of the other sizes")
    options.add_argument("--profile", action="store_true")
    options.add_argument("--balanced", action="store_true", help="tokens go where all experts get as many")
    options.add_argument("--uneven", action="store_true", help="documents of any length from half of --length on")
    for name, default in (
        ("layers", 8),
        ("length", 4096),
        ("per-row", 1),
        ("micro", 2),
        ("accumulate", 4),
        ("tensor", 1),
        ("pipeline", 1),
        ("expert", 1),
        ("expert-tensor", 1),
        ("context", 1),
        ("data", 1),
    ):
        options.add_argument(f"--{name}", type=int, default=default)
    return options


if __name__ == "__main__":
    main()
