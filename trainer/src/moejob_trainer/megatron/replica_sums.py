"""Whole gradients on their way to the shares of replicas: summed from the memory that products wrote, beside others.

Knows no layers and no matrices.
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
from moejob_trainer.megatron.share_memory import ShareMemory

Add = Callable[[Tensor], None]


class ReplicaSums:
    """Sums over a group, of each size of gradient a few at a time, in memory that is used again."""

    def __init__(self, group: Group, stream: SideStream, memory: GradientMemory) -> None:
        self.group, self._stream, self._memory = group, stream, memory
        self._sent: dict[int, deque[tuple[Tensor, Finish]]] = {}

    def lend(self, elements: int) -> Tensor:
        """Memory for a gradient to be written to."""
        sent = self._sent.setdefault(elements, deque())
        if len(sent) < self._memory.most:
            return self._memory.new(elements)
        gradient, finish = sent.popleft()
        finish()
        return gradient

    def send(self, gradient: Tensor, add: Add) -> None:
        """Begin to sum what was lent over replicas; `add` gets the rows of this rank's share."""
        finish = self._stream.begin(partial(self._memory.summed, gradient, self.group), add)
        self._sent[gradient.numel()].append((gradient, finish))

    def finish(self) -> None:
        """Wait for all sums, and keep no memory that others could use."""
        for elements, sent in self._sent.items():
            for _, finish in sent:
                finish()
            kept = sent if self._memory.is_fixed else ()
            self._sent[elements] = deque((gradient, _nothing) for gradient, _ in kept)


class GradientMemory:
    """Memory of the allocator, `most` tensors of a size, which NCCL or gloo sums."""

    is_fixed = False

    def __init__(self, dtype: torch.dtype, device: torch.device, most: int) -> None:
        self.most, self._dtype, self._device = most, dtype, device

    def new(self, elements: int) -> Tensor:
        """One more of them."""
        return torch.empty(elements, dtype=self._dtype, device=self._device)

    def summed(self, gradient: Tensor, group: Group) -> PendingCollective:
        """Begin to sum the rows of this rank's share."""
        if group.size == 1:
            return PendingCollective(gradient, gradient, None)
        return start_reduce_scatter(gradient, group, is_async=not gradient.is_cuda)


class ReadGradientMemory(GradientMemory):
    """Memory that all replicas read, for as long as the model: they copy their rows, without a multiprocessor."""

    is_fixed = True

    def __init__(self, memory: ShareMemory, dtype: torch.dtype, device: torch.device, most: int) -> None:
        super().__init__(dtype, device, most)
        self._memory = memory
        self._everyones: dict[int, Sequence[Tensor]] = {}

    def new(self, elements: int) -> Tensor:
        """One more of them."""
        own, everyones = self._memory.take(elements, self._dtype)
        self._everyones[own.data_ptr()] = everyones
        return own

    def summed(self, gradient: Tensor, group: Group) -> PendingCollective:
        """Sum the rows of this rank's share, the next rank's first: no two ranks read from one."""
        meet, everyones = self._memory.barrier, self._everyones[gradient.data_ptr()]
        if meet is None or not everyones:
            return super().summed(gradient, group)
        parts = [one.view(group.size, -1)[group.rank] for one in everyones]
        rows = torch.empty_like(parts[group.rank])
        meet()
        first, *others = (*range(group.rank + 1, group.size), *range(group.rank))
        rows.copy_(parts[first])
        rows.add_(parts[group.rank])
        for rank in others:
            rows.add_(torch.empty_like(rows).copy_(parts[rank]))
        # No product writes before all have read.
        meet()
        return PendingCollective(rows, gradient, None)


def _nothing() -> None:
    """It is done."""
