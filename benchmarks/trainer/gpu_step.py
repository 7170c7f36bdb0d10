"""Training steps of one shape on the GPUs of this machine: tokens per second, TFLOP/s and memory.

    python -m benchmarks.trainer.gpu_step --micro 4 --accumulate 4
    torchrun --nproc-per-node 4 -m benchmarks.trainer.gpu_step --expert 4 --layers 24 --dispatcher Flex

Random tokens, real routing, nothing dropped; a whole step with clipping and Adam. Prints one JSON line.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Mapping

import numpy as np
import torch
import torch.distributed as dist

from benchmarks.trainer.engines import joined, loss, started
from moejob_api.job import Spec
from moejob_api.models import catalog
from moejob_api.planner.cost.estimate import model_flops
from moejob_trainer.engine import UpdateResult
from moejob_trainer.layers.kernels import attention

STEPS, WARM = 8, 3
OVERLAPS: Mapping[str, Mapping[str, bool]] = {
    "all": {"overlapParameterGather": True, "overlapOptimizerCopies": True},
    "sums": {},
    "none": {"overlapGradientReduction": False},
}


def main() -> None:
    """Measures and prints."""
    chosen = _arguments()
    config = dict(catalog.config(chosen.model) or {}) | {"num_hidden_layers": chosen.layers}
    of_rank = started(config, _spec(chosen), joined())
    engine, sizes = of_rank.engine, of_rank.sizes
    random = np.random.default_rng(1)
    seconds, result = [], None
    for _ in range(STEPS):
        count = chosen.micro * chosen.accumulate * sizes.data * chosen.per_row
        lengths = (
            random.integers(chosen.length // 2, chosen.length, count) if chosen.uneven else [chosen.length] * count
        )
        mine = of_rank.batch(lengths, random)
        torch.cuda.synchronize()
        begun = time.perf_counter()
        result = engine.update(mine, loss)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    if chosen.profile:
        _profile(lambda: engine.update(mine, loss))
    if of_rank.groups.world.rank == 0 and result is not None:
        flops_per_token = model_flops(of_rank.model.shape, chosen.length)
        print(json.dumps(_measured(chosen, flops_per_token, result, seconds[WARM:])))
    dist.destroy_process_group()


def _profile(step: Callable[[], object]) -> None:
    """Return where the time of one step goes, kernel by kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
        step()
        torch.cuda.synchronize()
    print(seen.key_averages().table(sort_by="cuda_time_total", row_limit=45, max_name_column_width=90))


def _measured(
    chosen: argparse.Namespace, flops_per_token: float, result: UpdateResult, seconds: list[float]
) -> dict[str, object]:
    step = float(np.median(seconds))
    ranks = dist.get_world_size()
    return {
        "case": vars(chosen) | {"attention": "flash-attn-4" if _has_flash() else "cuDNN"},
        "tokensPerSecondPerGpu": round(result.tokens / step / ranks),
        "teraflops": round(result.tokens * flops_per_token / step / ranks / 1e12, 1),
        "secondsPerStep": round(step, 4),
        "peakGiB": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "loss": round(result.loss, 4),
        "gradNorm": round(result.gradient_norm, 4),
        "torch": torch.__version__,
        "device": torch.cuda.get_device_name(),
    }


def _has_flash() -> bool:
    """Return whether flash-attn-4 works here; installed beside other versions of what it is built on it does not."""
    head = torch.empty(1, 1, 128, dtype=torch.bfloat16, device="cuda")
    return attention.flash_takes(head, head)


def _spec(chosen: argparse.Namespace) -> Spec:
    return Spec.model_validate_json(
        json.dumps(
            {
                "method": "SFT",
                "model": {"source": chosen.model, "dtype": "bfloat16"},
                "data": {
                    "train": [{"source": "/none.jsonl", "format": "Text"}],
                    "maxLength": chosen.length * chosen.per_row,
                },
                "parallelism": {
                    "tensor": chosen.tensor,
                    "pipeline": chosen.pipeline,
                    "expert": chosen.expert,
                    "context": chosen.context,
                    "data": chosen.data,
                },
                "training": {
                    "maxSteps": STEPS,
                    "globalBatchSize": chosen.micro * chosen.accumulate,
                    "microBatchSize": chosen.micro,
                    "precision": {"gradients": chosen.gradients, "moments": chosen.moments},
                    "recompute": {"granularity": chosen.recompute, "modules": chosen.modules},
                    "communication": OVERLAPS[chosen.overlaps],
                },
                "moe": {"balancing": "None", "dispatcher": chosen.dispatcher},
                "memory": {"sharding": chosen.sharding, "offloadOptimizer": chosen.offload},
                "storage": {"size": "1Gi"},
                "resources": {"gpuType": "H200"},
            }
        )
    )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="Qwen/Qwen3-30B-A3B")
    parser.add_argument("--gradients", default="float32")
    parser.add_argument("--moments", default="float32")
    parser.add_argument("--recompute", default="None")
    parser.add_argument("--modules", nargs="*", default=[], help="of --recompute Selective; its own choice without")
    parser.add_argument("--sharding", default="DistributedOptimizer")
    parser.add_argument("--dispatcher", default="AllToAll", help="AllToAll, AllGather or Flex")
    parser.add_argument("--overlaps", choices=[*OVERLAPS], default="sums", help="exchanges beside the computation")
    parser.add_argument("--offload", type=float, default=0.0, help="share of the optimizer in host memory")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--uneven", action="store_true", help="documents of any length from half of --length on")
    for name, default in (
        ("layers", 8),
        ("length", 4096),
        ("per-row", 1),
        ("micro", 2),
        ("accumulate", 4),
        ("tensor", 1),
        ("pipeline", 1),
        ("expert", 1),
        ("context", 1),
        ("data", 1),
    ):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


if __name__ == "__main__":
    main()
