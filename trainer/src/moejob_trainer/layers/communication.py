"""Collectives through which gradients flow back."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moejob_trainer.layers.documents import in_rank_order, in_row_order

# torch 2.11 has them under their other names.
all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def gathered_row(held: Tensor, group: dist.ProcessGroup) -> Tensor:
    """The whole row, of which each rank of the context group holds its chunks. [t, ...] -> [t * context_size, ...]

    Backward, every rank receives the sum of what all ranks say about its tokens.
    """
    row: Tensor = _GatheredRow.apply(held, group)
    return row


class _GatheredRow(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, held: Tensor, group: dist.ProcessGroup) -> Tensor:
        context.group = group
        gathered = held.new_empty(held.shape[0] * group.size(), *held.shape[1:])
        all_gather(gathered, held.contiguous(), group=group)
        return in_row_order(gathered, group.size())

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None]:
        by_rank = in_rank_order(gradient, context.group.size()).contiguous()
        held = by_rank.new_empty(by_rank.shape[0] // context.group.size(), *by_rank.shape[1:])
        reduce_scatter(held, by_rank, group=context.group)
        return held, None
