"""The device of a rank, and the backend between ranks of such devices."""

from __future__ import annotations

import os
import resource
from datetime import timedelta

import torch
import torch.distributed as dist

from moejob_api.derived import has_float8_products
from moejob_api.job.resources import Accelerator
from moejob_trainer.errors import BadConfiguration, TransientFailure
from moejob_trainer.runtime.cores import count_cores
from moejob_trainer.runtime.cpu_backend import cpu_backend
from moejob_trainer.runtime.environment import RankEnvironment
from moejob_trainer.runtime.ranks_meeting import ranks_store

# Exchanges of a healthy run are closer together; a launcher notices a dead rank long before.
_PATIENCE = timedelta(minutes=30)
_KIB = 1024
# The first that multiplies FP8 numbers and writes their sums as its kernels here want them: Hopper.
_FLOAT8_CAPABILITY = (9, 0)


# All ranks wait for the rank that downloads a model; a launcher notices a rank that dies meanwhile.
_LONGEST_PREPARATION = timedelta(hours=24)


def start_device(environment: RankEnvironment) -> torch.device:
    """Take this rank's device and join the world; a GPU job never falls back to the CPU."""
    if environment.spec.training.deterministic:
        # Before anything touches a GPU: cuBLAS and NCCL read their variables once.
        compute_deterministically()
    device = _take_device(environment)
    backend = "nccl" if device.type == "cuda" else cpu_backend()
    dist.init_process_group(
        backend,
        store=ranks_store(environment, _PATIENCE),
        rank=environment.rank,
        world_size=environment.world,
        timeout=_PATIENCE,
        device_id=device if device.type == "cuda" else None,
    )
    return device


def compute_deterministically() -> None:
    """Let torch choose algorithms that give the same bits each time, and refuse operations that have none."""
    # Only with a workspace of fixed size does cuBLAS sum in one order, whatever runs beside it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    # NVLink's switches add what arrives first first; rings and trees have an order.
    os.environ.setdefault("NCCL_ALGO", "^NVLS")
    torch.use_deterministic_algorithms(mode=True)


def new_control_group() -> dist.ProcessGroup:
    """Return a group of all ranks for small messages and decisions: it never waits for a GPU."""
    group: dist.ProcessGroup = dist.new_group(backend=cpu_backend(), timeout=_LONGEST_PREPARATION)
    return group


def peak_memory_bytes(device: torch.device) -> int:
    """Return the peak memory of this rank so far: of torch on a GPU, of the whole process on a CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB


def _take_device(environment: RankEnvironment) -> torch.device:
    if environment.spec.resources.accelerator is Accelerator.CPU:
        share_cores(environment.ranks_per_node)
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if environment.local_rank >= count:
        # Without any GPU the configuration is wrong; where some are missing, one has failed: another node may help.
        raise (TransientFailure if count else BadConfiguration)(
            f"rank {environment.rank} needs GPU {environment.local_rank} of its pod, which has "
            f"{count}; check the device plugin and resources.gpuResource, or set "
            "resources.accelerator to CPU"
        )
    device = torch.device("cuda", environment.local_rank)
    torch.cuda.set_device(device)
    if has_float8_products(environment.spec):
        _check_float8(device)
    return device


def _check_float8(device: torch.device) -> None:
    capability = torch.cuda.get_device_capability(device)
    if capability < _FLOAT8_CAPABILITY:
        raise BadConfiguration(
            f"training.precision.compute FP8 needs a GPU of compute capability {_capability_text(_FLOAT8_CAPABILITY)} "
            f"or later, and {torch.cuda.get_device_name(device)} has {_capability_text(capability)}; remove compute"
        )


def _capability_text(capability: tuple[int, int]) -> str:
    return ".".join(map(str, capability))


def share_cores(ranks: int) -> None:
    """Divide the cores among the ranks of a pod; OMP_NUM_THREADS, where set, decides instead."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    torch.set_num_threads(max(1, count_cores() // ranks))
