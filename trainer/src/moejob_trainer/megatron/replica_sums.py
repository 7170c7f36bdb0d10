"""Whole gradients, reduced to the shares of replicas while further products run.

A gradient of 8 elements on 2 replicas: each writes all 8, rank 0 gets the sums of elements 0 to 3, rank 1 the sums of 4
to 7, and both add these to the sums of earlier micro batches in their shares. Knows no layers and no matrices.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from moejob_trainer.distributed.collectives import PendingCollective, start_reduce_scatter
from moejob_trainer.distributed.groups import Group
from moejob_trainer.distributed.side_stream import Finish, SideStream
from moejob_trainer.layers.kernels import find_kernels
from moejob_trainer.megatron.share_memory import ShareMemory


class ReplicaSums:
    """Sums over a group: a few gradients of each size at a time, in memory that is used again."""

    def __init__(self, group: Group, stream: SideStream, memory: GradientMemory) -> None:
        self.group, self._stream, self._memory = group, stream, memory
        self._sent: dict[int, deque[tuple[Tensor, Finish]]] = {}

    def lend_gradient(self, elements: int) -> Tensor:
        """Return memory for a gradient; wait for the oldest sum if all memory of this size is in use."""
        in_flight = self._sent.setdefault(elements, deque())
        if len(in_flight) < self._memory.max_tensors:
            return self._memory.allocate_gradient(elements)
        gradient, finish = in_flight.popleft()
        finish()
        return gradient

    def send_gradient(self, gradient: Tensor, total: Tensor) -> None:
        """Start to sum a lent gradient over replicas, and to add this rank's share of the sum to `total`."""
        finish = self._memory.start_sum(total, gradient, self.group, self._stream)
        self._sent[gradient.numel()].append((gradient, finish))

    def finish_sums(self) -> None:
        """Wait for all sums, and give memory back to the allocator, unless peers read it."""
        for elements, in_flight in self._sent.items():
            for _, finish in in_flight:
                finish()
            reusable = in_flight if self._memory.is_fixed else ()
            self._sent[elements] = deque((gradient, _do_nothing) for gradient, _ in reusable)


class GradientMemory:
    """Tensors of the allocator, at most a given number of each size, which NCCL or gloo sums."""

    is_fixed = False

    def __init__(self, dtype: torch.dtype, device: torch.device, max_tensors: int) -> None:
        self.max_tensors, self._dtype, self._device = max_tensors, dtype, device

    def allocate_gradient(self, elements: int) -> Tensor:
        """Allocate one more tensor."""
        return torch.empty(elements, dtype=self._dtype, device=self._device)

    def start_sum(self, total: Tensor, gradient: Tensor, group: Group, stream: SideStream) -> Finish:
        """Start to add the sum of all replicas' gradients to `total`, this rank's share; the last may be shorter."""
        return stream.start_exchange(partial(_start_reduce_scatter, gradient, group), partial(_add_share, total))


class PeerGradientMemory(GradientMemory):
    """Memory that all replicas read, kept as long as the model: copies of it need no multiprocessor."""

    is_fixed = True

    def __init__(self, memory: ShareMemory, dtype: torch.dtype, device: torch.device, max_tensors: int) -> None:
        super().__init__(dtype, device, max_tensors)
        self._memory = memory
        self._peer_gradients: dict[int, Sequence[Tensor]] = {}

    def allocate_gradient(self, elements: int) -> Tensor:
        """Take one more tensor from the shared memory."""
        local_gradient, peer_gradients = self._memory.take_share(elements, self._dtype)
        self._peer_gradients[local_gradient.data_ptr()] = peer_gradients
        return local_gradient

    def start_sum(self, total: Tensor, gradient: Tensor, group: Group, stream: SideStream) -> Finish:
        """Start to add the sum of all replicas' gradients to `total`, read from their memory."""
        barrier, peer_gradients = self._memory.barrier, self._peer_gradients[gradient.data_ptr()]
        if barrier is None or not peer_gradients:
            return super().start_sum(total, gradient, group, stream)
        shares = [peer_gradient.view(group.size, -1)[group.rank][: total.numel()] for peer_gradient in peer_gradients]
        return stream.run(partial(_sum_peer_shares, total, shares, group.rank, barrier))


def _start_reduce_scatter(gradient: Tensor, group: Group) -> PendingCollective:
    if group.size == 1:
        return PendingCollective(gradient, gradient, None)
    return start_reduce_scatter(gradient, group, is_async=not gradient.is_cuda)


def _add_share(total: Tensor, share: Tensor) -> None:
    total.add_(share[: total.numel()])


def _sum_peer_shares(total: Tensor, shares: Sequence[Tensor], local_rank: int, barrier: Callable[[], None]) -> None:
    """Add all shares to a total, the next rank's first: no two ranks read from the same rank at a time."""
    barrier()
    first, *other_ranks = (*range(local_rank + 1, len(shares)), *range(local_rank))
    peer_sum = torch.empty_like(shares[first]).copy_(shares[first])
    for rank in other_ranks:
        peer_sum.add_(torch.empty_like(peer_sum).copy_(shares[rank]))
    # No product may write before all ranks have read. This rank's own share is read after this barrier: its next
    # product waits for the end of this function.
    barrier()
    fast = find_kernels("sums", total)
    if fast is None:
        total.add_(peer_sum + shares[local_rank])
    else:
        fast.add_both(total, peer_sum, shares[local_rank])


def _do_nothing() -> None:
    """It is done."""
