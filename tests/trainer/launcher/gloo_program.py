"""Ranks that meet over gloo: by torchrun's variables alone, or in the launcher's store as the trainer's ranks do."""

from __future__ import annotations

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from moejob_trainer.runtime.environment import read_rank_environment
from moejob_trainer.runtime.heartbeats import working_heartbeat
from moejob_trainer.runtime.ranks_meeting import ranks_store
from trainer.launcher.rank_programs import rank, restart, start


def join_ranks() -> None:
    environment = read_rank_environment()
    store = ranks_store(environment, timedelta(minutes=30))
    assert store is not None
    dist.init_process_group("gloo", store=store, rank=environment.rank, world_size=environment.world)


def gather_ranks() -> int:
    """Gather by torchrun's variables alone, as a script does that knows no moejob."""
    dist.init_process_group("gloo")
    mine = torch.tensor([dist.get_rank(), int(os.environ["MOEJOB_INDEX"])])
    everyone = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, mine)
    start(everyone=[row.tolist() for row in everyone])
    dist.destroy_process_group()
    return 0


def gather_ranks_twice() -> int:
    """Gather, fail, and gather again at the same address and port."""
    code = gather_ranks()
    return code if restart() else 1


def meet() -> int:
    """Meet in the store; in the first round, wait there for what never comes."""
    join_ranks()
    start()
    if not restart():
        dist.distributed_c10d._get_default_store().get("never")  # noqa: SLF001  # a store has no other way to it
    dist.destroy_process_group()
    return 0


def hang_before_the_first_step() -> int:
    """Rank 1 waits for what never comes, rank 0 for rank 1 in a collective; the second start ends well."""
    with working_heartbeat(start()):
        join_ranks()
        if restart() == 0 and rank() == 1:
            threading.Event().wait()
        dist.barrier()
    dist.destroy_process_group()
    return 0


def load_for_longer_than_the_deadline() -> int:
    """Rank 1 reads for that long, and rank 0 waits for it in a collective."""
    with working_heartbeat(start()):
        join_ranks()
        until = time.monotonic() + 25.0
        while rank() == 1 and time.monotonic() < until:
            Path("/proc/self/maps").read_bytes()
            time.sleep(0.1)
        dist.barrier()
    dist.destroy_process_group()
    return 0
