"""The mapping of peers' memory into this process: once for the whole run, since all ranks have to take part.

Finds out where ranks run; `peers` decides whether they reach one another.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import TypeAdapter

from moejob_trainer.distributed import messages
from moejob_trainer.distributed.peer_memory import PeerMemory
from moejob_trainer.distributed.peers import PeerPlace, find_obstacle
from moejob_trainer.errors import BadConfiguration

log = logging.getLogger(__name__)

_PLACE = TypeAdapter(PeerPlace)
_PATH = TypeAdapter(str)


@dataclass(frozen=True, slots=True)
class PeerUse:
    """A use of peer memory, for the log: its name, the fallback, and the setting that turns it off."""

    name: str
    fallback: str
    way_out: str


FOR_TOKENS = PeerUse(
    "dispatcher Flex", "dispatcher Flex becomes AllToAll for an expert group", "set moe.dispatcher to AllToAll"
)
FOR_SHARES = PeerUse(
    "training.communication.readReplicas",
    "experts' shares travel by NCCL",
    "set training.communication.readReplicas to false",
)


def map_peer_memory(
    size_bytes: int, group: dist.ProcessGroup | None, device: torch.device, use: PeerUse
) -> PeerMemory | None:
    """Return memory that all ranks of a group read and write; None, logged once, where they cannot reach it.

    Every rank of the group calls it.
    """
    if group is None or not size_bytes:
        return None
    reason = find_obstacle(messages.all_gather_values(_read_peer_place(device), _PLACE, group))
    if reason:
        if group.rank() == 0:
            log.warning("%s: %s", use.fallback, reason)
        return None
    return (
        _map_gpu_memory(size_bytes, group, device, use)
        if device.type == "cuda"
        else _map_host_memory(size_bytes, group)
    )


def _read_peer_place(device: torch.device) -> PeerPlace:
    if device.type != "cuda":
        return PeerPlace(_read_machine_identity())
    local_gpu = torch.cuda.current_device()
    reachable_gpus = [
        n
        for n in range(torch.cuda.device_count())
        if n != local_gpu and torch.cuda.can_device_access_peer(local_gpu, n)
    ]
    return PeerPlace(_read_machine_identity(), _gpu_uuid(local_gpu), tuple(map(_gpu_uuid, reachable_gpus)))


def _gpu_uuid(index: int) -> str:
    return str(torch.cuda.get_device_properties(index).uuid)


def _read_machine_identity() -> str:
    # A host name would not do: pods on the node's network share it, and cannot open each other's files.
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot} {Path('/proc/self/ns/pid').readlink()}"


def _map_gpu_memory(size_bytes: int, group: dist.ProcessGroup, device: torch.device, use: PeerUse) -> PeerMemory:
    # Multicast objects of NVLink switches are not used here, and some machines refuse to make them.
    os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
    # On a machine without CUDA the module warns.
    from torch.distributed import _symmetric_memory as symmetric_memory  # noqa: PLC0415

    try:
        local_share = symmetric_memory.empty(size_bytes, dtype=torch.uint8, device=device)
        handle = symmetric_memory.rendezvous(local_share, group)
    except RuntimeError as error:
        raise BadConfiguration(
            f"{use.name} needs {size_bytes} bytes on each GPU that the others of its node can map, and got none: "
            f"{error}; {use.way_out}"
        ) from error
    peers = [handle.get_buffer(rank, (size_bytes,), torch.uint8) for rank in range(group.size())]
    # Torch frees the memory with the tensor that it returned.
    peers[group.rank()] = local_share
    return PeerMemory(group.rank(), tuple(peers), handle.barrier)


def _map_host_memory(size_bytes: int, group: dist.ProcessGroup) -> PeerMemory:
    """Map unnamed files of all ranks, which exist until the last process unmaps them."""
    descriptor = os.memfd_create("moejob-peer-memory")
    os.ftruncate(descriptor, size_bytes)
    paths = messages.all_gather_values(f"/proc/{os.getpid()}/fd/{descriptor}", _PATH, group)
    shares = tuple(torch.from_file(path, shared=True, size=size_bytes, dtype=torch.uint8) for path in paths)
    messages.wait_for_group(group)
    os.close(descriptor)
    return PeerMemory(group.rank(), shares, partial(messages.wait_for_group, group))
