"""The backend between ranks on CPUs: gloo, with one device for all groups of a process, and one worker for each group.

Asked for gloo, torch gives each group a device of its own, whose thread wakes up a hundred times a second to look
for something to do: eight ranks of twenty groups each do so 16,000 times, on the cores that they compute on. And each
group gets two working threads: overlapping gathers of one group then sometimes destroy the heap.
"""

from __future__ import annotations

import os
from datetime import timedelta
from functools import cache

import torch.distributed as dist
from torch._C._distributed_c10d import Store

_NAME = "moejob_gloo"


@cache
def cpu_backend() -> str:
    """Register the backend with torch, and return its name."""
    # The devices of gloo: a barrier names the GPU of its rank.
    dist.Backend.register_backend(_NAME, _new_gloo_group, devices=["cpu", "cuda"])
    return _NAME


def _new_gloo_group(store: Store, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroupGloo:
    # The options have no public names and no types.
    options = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]  # noqa: SLF001
    options._devices, options._threads, options._timeout = [*_gloo_devices()], 1, timeout  # noqa: SLF001
    group = dist.ProcessGroupGloo(store, rank, size, options)
    group._set_sequence_number_for_group()  # noqa: SLF001  # TORCH_DISTRIBUTED_DEBUG compares it, and torch sets it
    return group


@cache
def _gloo_devices() -> tuple[dist.ProcessGroupGloo.Device, ...]:
    """Listen where torch would: on the interfaces that are named, else where this host's name leads to."""
    interfaces, gloo = os.environ.get("GLOO_SOCKET_IFNAME", ""), dist.ProcessGroupGloo
    # Groups of one device that connect when something is sent (TORCH_GLOO_LAZY_INIT) wait for ever.
    if not interfaces:
        return (gloo.create_default_device(lazy_init=False),)
    return tuple(gloo.create_device(interface=name, lazy_init=False) for name in interfaces.split(","))
