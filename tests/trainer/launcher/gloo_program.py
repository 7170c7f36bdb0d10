"""A rank that tells all others who it is, over gloo."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist

from trainer.launcher.rank_programs import restart, start


def gather_ranks() -> int:
    dist.init_process_group("gloo")
    mine = torch.tensor([dist.get_rank(), int(os.environ["MOEJOB_INDEX"])])
    everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    start(everyone=[row.tolist() for row in everyone])
    dist.destroy_process_group()
    return 0


def meet() -> int:
    """Meet in the store; in the first round, wait there for what never comes."""
    dist.init_process_group("gloo")
    start()
    if not restart():
        dist.distributed_c10d._get_default_store().get("never")  # noqa: SLF001  # a store has no other way to it
    dist.destroy_process_group()
    return 0
