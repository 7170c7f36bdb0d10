"""Memory for shares of experts' matrices: this rank's own memory, or memory that the replicas of a node read.

Copy engines of the GPUs, which no product needs, read the shares of other ranks. Only the barrier of the memory orders
reads and writes: a share may change only between two barriers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from moejob_api.arithmetic import round_up
from moejob_trainer.distributed.groups import Group
from moejob_trainer.distributed.peer_mapping import FOR_SHARES, map_peer_memory
from moejob_trainer.distributed.peer_memory import PeerMemory

# Copies are fastest at addresses that are multiples of it.
ALIGNMENT_BYTES = 256


class ShareMemory:
    """Hands out memory for shares, on every rank in the same order."""

    def __init__(self, peers: PeerMemory | None, device: torch.device) -> None:
        self._peers, self._device, self._taken_bytes = peers, device, 0

    @property
    def barrier(self) -> Callable[[], None] | None:
        """Return the barrier, on the device, of all ranks that read this memory; None where no other rank does."""
        return None if self._peers is None else self._peers.barrier

    def take_share(self, elements: int, dtype: torch.dtype) -> tuple[Tensor, Sequence[Tensor]]:
        """Return zeros for this rank's share, and those of all ranks where these are in reach."""
        if self._peers is None:
            return torch.zeros(elements, dtype=dtype, device=self._device), ()
        start, stop = self._taken_bytes, self._taken_bytes + elements * dtype.itemsize
        self._taken_bytes = round_up(stop, ALIGNMENT_BYTES)
        peer_shares = [share[start:stop].view(dtype) for share in self._peers.shares]
        return peer_shares[self._peers.rank].zero_(), peer_shares


def make_share_memory(elements: Sequence[int], dtype: torch.dtype, group: Group, device: torch.device) -> ShareMemory:
    """Return memory for shares of these sizes, readable by all ranks of the group if they reach each other."""
    size_bytes = sum(round_up(count * dtype.itemsize, ALIGNMENT_BYTES) for count in elements)
    return ShareMemory(
        map_peer_memory(size_bytes, group.handle, device, FOR_SHARES) if group.size > 1 else None, device
    )
