"""Groups of ranks on CPUs share one thread that waits for what others send, and work with one thread each."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from moejob_trainer.runtime.cpu_backend import cpu_backend
from trainer.worlds import Worlds

GROUPS = 5
# A process has one for each device of gloo, and each wakes up a hundred times a second.
LOOP = "gloo_tcp_loop"
# A group has as many as it may do at a time.
WORKER = "pt_gloo_runloop"
ALONE = """
import time
import torch.distributed as dist
from pathlib import Path
from moejob_trainer.runtime.cpu_backend import cpu_backend

def names():
    return [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]

dist.init_process_group(cpu_backend(), store=dist.HashStore(), rank=0, world_size=1)
groups = [dist.group.WORLD, dist.new_group(backend=cpu_backend())]
for group in groups:
    dist.barrier(group=group)
# A thread has the name of the process until it gives itself its own.
until = time.monotonic() + 60
while names().count(names()[0]) > 1 and time.monotonic() < until:
    time.sleep(0.01)
print(*names())
"""


def loops() -> int:
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count(LOOP)


def summed() -> tuple[list[float], int]:
    """Return what several groups sum, all at once, and the number of loops of this rank."""
    groups = [dist.new_group(backend=cpu_backend()) for _ in range(GROUPS)]
    found = [torch.full((1000,), float(number + dist.get_rank())) for number in range(GROUPS)]
    for work in [dist.all_reduce(one, group=group, async_op=True) for one, group in zip(found, groups, strict=True)]:
        assert work is not None
        work.wait()
    return [one.unique().item() for one in found], loops()


def test_all_groups_of_a_rank_have_one_loop_and_sum_what_each_was_given(worlds: Worlds) -> None:
    assert worlds.run(3, summed) == [([3.0 * number + 3.0 for number in range(GROUPS)], 1)] * 3


def test_ranks_with_a_gpu_can_name_it_to_their_control_group() -> None:
    """A barrier does."""
    devices = dist.Backend.backend_capability
    assert devices[cpu_backend()] == devices[dist.Backend.GLOO]


def alone(interfaces: str) -> subprocess.CompletedProcess[str]:
    """A process whose groups listen there."""
    named = os.environ | {"GLOO_SOCKET_IFNAME": interfaces}
    return subprocess.run([sys.executable, "-c", ALONE], env=named, capture_output=True, text=True, check=False)


def test_a_group_does_one_thing_at_a_time() -> None:
    """With two workers, four of 150 runs whose gathers overlapped died of a heap that these had destroyed."""
    done = alone("lo")
    assert done.stdout.split().count(WORKER) == 2, done.stderr


def test_groups_listen_on_all_interfaces_that_are_named() -> None:
    done = alone("lo,lo")
    assert done.stdout.split().count(LOOP) == 2, done.stderr


def test_an_interface_that_is_not_there_is_named() -> None:
    assert "no-such" in alone("no-such").stderr
