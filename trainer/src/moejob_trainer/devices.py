"""What a rank computes on, and how ranks of such devices talk to each other."""

from __future__ import annotations

import os
import resource
from datetime import timedelta

import torch
import torch.distributed as dist

from moejob_api.job.resources import Accelerator
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.orders import Orders

# Between two exchanges of a healthy run lies less; a rank that died is noticed by its launcher long before.
_PATIENCE = timedelta(minutes=30)
_KIB = 1024


# All wait for the one that downloads a model; who died meanwhile is noticed by a launcher.
_LONGEST_PREPARATION = timedelta(hours=24)


def start_device(order: Orders) -> torch.device:
    """Takes this rank's device and joins the world; a GPU job never falls back to the CPU."""
    device = _device(order)
    backend = "nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, timeout=_PATIENCE, device_id=device if device.type == "cuda" else None)
    return device


def control_group() -> dist.ProcessGroup:
    """All ranks, for words and decisions: never waits for a GPU."""
    group: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_LONGEST_PREPARATION)
    return group


def peak_memory_bytes(device: torch.device) -> int:
    """The most that this rank has held so far: on the GPU by torch, on the CPU by the whole process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB


def _device(order: Orders) -> torch.device:
    if order.spec.resources.accelerator is Accelerator.CPU:
        share_cores(order.ranks_per_node)
        return torch.device("cpu")
    if order.local_rank >= torch.cuda.device_count():
        raise BadConfiguration(
            f"rank {order.rank} needs GPU {order.local_rank} of its pod, which has {torch.cuda.device_count()}; see to "
            "the device plugin and resources.gpuResource, or set resources.accelerator to CPU"
        )
    device = torch.device("cuda", order.local_rank)
    torch.cuda.set_device(device)
    return device


def share_cores(ranks: int) -> None:
    """Ranks that each take all cores take turns instead of working; who says how many threads they have, decides."""
    if "OMP_NUM_THREADS" in os.environ:
        return
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // ranks))
