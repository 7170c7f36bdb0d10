"""Whole gradients, reduced to the shares of replicas while further products run.

A gradient of 8 elements on 2 replicas: each writes all 8, rank 0 gets the sum of elements 0 to 3, rank 1 that of 4 to
7, and both add it to what earlier micro batches left in their shares. Knows no layers and no matrices.
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
from moejob_trainer.layers.kernels import kernels
from moejob_trainer.megatron.share_memory import ShareMemory


class ReplicaSums:
    """Sums over a group: a few gradients of each size at a time, in memory that is used again."""

    def __init__(self, group: Group, stream: SideStream, memory: GradientMemory) -> None:
        self.group, self._stream, self._memory = group, stream, memory
        self._sent: dict[int, deque[tuple[Tensor, Finish]]] = {}

    def lend(self, elements: int) -> Tensor:
        """Return memory for a gradient; wait for the oldest sum if all memory of this size is in use."""
        sent = self._sent.setdefault(elements, deque())
        if len(sent) < self._memory.most:
            return self._memory.new(elements)
        gradient, finish = sent.popleft()
        finish()
        return gradient

    def send(self, gradient: Tensor, total: Tensor) -> None:
        """Start to sum a lent gradient over replicas, and to add this rank's share of the sum to `total`."""
        finish = self._memory.sum_into(total, gradient, self.group, self._stream)
        self._sent[gradient.numel()].append((gradient, finish))

    def finish(self) -> None:
        """Wait for all sums, and give memory back to the allocator, unless peers read it."""
        for elements, sent in self._sent.items():
            for _, finish in sent:
                finish()
            kept = sent if self._memory.is_fixed else ()
            self._sent[elements] = deque((gradient, _nothing) for gradient, _ in kept)


class GradientMemory:
    """Tensors of the allocator, at most a given number of each size, which NCCL or gloo sums."""

    is_fixed = False

    def __init__(self, dtype: torch.dtype, device: torch.device, most: int) -> None:
        self.most, self._dtype, self._device = most, dtype, device

    def new(self, elements: int) -> Tensor:
        """Allocate one more tensor."""
        return torch.empty(elements, dtype=self._dtype, device=self._device)

    def sum_into(self, total: Tensor, gradient: Tensor, group: Group, stream: SideStream) -> Finish:
        """Start to add the sum of all replicas' gradients to `total`, this rank's share; the last may be shorter."""
        return stream.begin(partial(_summed, gradient, group), partial(_add_to, total))


class ReadGradientMemory(GradientMemory):
    """Memory that all replicas read, kept as long as the model: copies of it need no multiprocessor."""

    is_fixed = True

    def __init__(self, memory: ShareMemory, dtype: torch.dtype, device: torch.device, most: int) -> None:
        super().__init__(dtype, device, most)
        self._memory = memory
        self._everyones: dict[int, Sequence[Tensor]] = {}

    def new(self, elements: int) -> Tensor:
        """Take one more tensor from the shared memory."""
        own, everyones = self._memory.take(elements, self._dtype)
        self._everyones[own.data_ptr()] = everyones
        return own

    def sum_into(self, total: Tensor, gradient: Tensor, group: Group, stream: SideStream) -> Finish:
        """Start to add the sum of all replicas' gradients to `total`, read from their memory."""
        meet, everyones = self._memory.barrier, self._everyones[gradient.data_ptr()]
        if meet is None or not everyones:
            return super().sum_into(total, gradient, group, stream)
        shares = [one.view(group.size, -1)[group.rank][: total.numel()] for one in everyones]
        return stream.run(partial(_read_into, total, shares, group.rank, meet))


def _summed(gradient: Tensor, group: Group) -> PendingCollective:
    if group.size == 1:
        return PendingCollective(gradient, gradient, None)
    return start_reduce_scatter(gradient, group, is_async=not gradient.is_cuda)


def _add_to(total: Tensor, share: Tensor) -> None:
    total.add_(share[: total.numel()])


def _read_into(total: Tensor, shares: Sequence[Tensor], own: int, meet: Callable[[], None]) -> None:
    """Add all shares to a total, the next rank's first: no two ranks read from the same rank at a time."""
    meet()
    first, *others = (*range(own + 1, len(shares)), *range(own))
    read = torch.empty_like(shares[first]).copy_(shares[first])
    for rank in others:
        read.add_(torch.empty_like(read).copy_(shares[rank]))
    # No product may write before all ranks have read. This rank's own share is read after this barrier: its next
    # product waits for the end of this function.
    meet()
    fast = kernels("sums", total)
    if fast is None:
        total.add_(read + shares[own])
    else:
        fast.add_both(total, read, shares[own])


def _nothing() -> None:
    """It is done."""
