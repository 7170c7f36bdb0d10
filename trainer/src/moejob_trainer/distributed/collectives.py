"""Collectives over a group of ranks, with and without gradients that flow back through them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from moejob_trainer.distributed.groups import Group

# The functions have other names in torch 2.11.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

# --- without gradients ----------------------------------------------------------------------------------------------


def sum_over_group(value: Tensor, group: Group) -> Tensor:
    """Sum a tensor over the group, in place."""
    if group.size > 1:
        dist.all_reduce(value, group=group.handle)
    return value


def all_gather_counts(count: Tensor, group: Group) -> Tensor:
    """Return the counts of every rank of the group: [size, *count.shape]."""
    if group.size == 1:
        return count.unsqueeze(0)
    gathered = count.new_empty(group.size * count.numel())
    _all_gather_single(gathered, count.flatten(), group=group.handle)
    return gathered.view(group.size, *count.shape)


@dataclass(frozen=True, slots=True)
class PendingCollective:
    """Rows on their way between ranks, while this rank computes something else."""

    rows: Tensor
    # Kept alive until the collective has read it.
    sent_rows: Tensor
    work: dist.Work | None

    def wait(self) -> Tensor:
        """Wait for the rows, and return them."""
        if self.work is not None:
            self.work.wait()
        return self.rows


def start_all_gather(
    x: Tensor, group: Group, into: Tensor | None = None, *, is_async: bool = True
) -> PendingCollective:
    """Start to gather the rows of all ranks, in the order of ranks, to new memory or to `into`.

    Without `is_async`, a CPU waits for them here, and a GPU orders its current stream behind them.
    """
    gathered, sent_rows = into, x.contiguous()
    if gathered is None:
        gathered = x.new_empty((group.size * x.shape[0], *x.shape[1:]))
    work = _all_gather_single(gathered, sent_rows, group=group.handle, async_op=is_async)
    return PendingCollective(gathered, sent_rows, work)


def start_reduce_scatter(x: Tensor, group: Group, *, is_async: bool = True) -> PendingCollective:
    """Start to sum rows over the group; this rank gets its share of them. `is_async` as in an all-gather."""
    share, sent_rows = x.new_empty((x.shape[0] // group.size, *x.shape[1:])), x.contiguous()
    work = _reduce_scatter_single(share, sent_rows, group=group.handle, async_op=is_async)
    return PendingCollective(share, sent_rows, work)


# --- with gradients -------------------------------------------------------------------------------------------------


def copy_to_group(x: Tensor, group: Group) -> Tensor:
    """Return x itself; each rank uses it differently, so gradients are summed over the group."""
    return _apply_exchange(x, group, _view_unchanged, _all_reduce)


def all_reduce(x: Tensor, group: Group) -> Tensor:
    """Sum over the group; every rank uses the sum alike."""
    return _apply_exchange(x, group, _all_reduce, _view_unchanged)


def all_gather(x: Tensor, group: Group) -> Tensor:
    """Gather the rows of all ranks, in their order; each rank uses them differently, so gradients are summed."""
    return _apply_exchange(x, group, _all_gather, _reduce_scatter)


def all_gather_alike(x: Tensor, group: Group) -> Tensor:
    """Gather the rows of all ranks; all use them alike, so each rank already has its rows' full gradient."""
    return _apply_exchange(x, group, _all_gather, _take_local_rows)


def reduce_scatter(x: Tensor, group: Group) -> Tensor:
    """Sum rows over the group, and return this rank's share of them."""
    return _apply_exchange(x, group, _reduce_scatter, _all_gather)


def local_rows(x: Tensor, group: Group) -> Tensor:
    """Return this rank's share of rows that are the same on every rank."""
    return _apply_exchange(x, group, _take_local_rows, _all_gather)


def all_to_all(x: Tensor, sent_counts: Sequence[int], received_counts: Sequence[int], group: Group) -> Tensor:
    """Send rows to each rank of the group, and return the received ones; both in the order of ranks.

    Two ranks, on rank 0: sent (1, 2) and received (1, 3) keep row 0, send rows 1 and 2 to rank 1, and return 4 rows.
    """
    exchange = partial(_all_to_all, sent=sent_counts, received=received_counts)
    gradient_exchange = partial(_all_to_all, sent=received_counts, received=sent_counts)
    return _apply_exchange(x, group, exchange, gradient_exchange)


def all_gather_uneven(x: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    """Gather the rows of all ranks, each with another number of them; gradients are summed."""
    return _apply_exchange(
        x, group, partial(_all_gather_uneven, counts=counts), partial(_reduce_scatter_uneven, counts=counts)
    )


def reduce_scatter_uneven(x: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    """Sum rows over the group, and return this rank's share, where ranks have shares of other lengths."""
    return _apply_exchange(
        x, group, partial(_reduce_scatter_uneven, counts=counts), partial(_all_gather_uneven, counts=counts)
    )


Exchange = Callable[[Tensor, Group], Tensor]


def _apply_exchange(x: Tensor, group: Group, exchange: Exchange, gradient_exchange: Exchange) -> Tensor:
    """Apply one exchange to x, and the other to its gradient."""
    if group.size == 1:
        return x
    result: Tensor = _ExchangeWithGradient.apply(x, group, exchange, gradient_exchange)  # type: ignore[no-untyped-call]
    return result


class _ExchangeWithGradient(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, exchange: Exchange, gradient_exchange: Exchange) -> Tensor:
        ctx.group, ctx.back = group, gradient_exchange
        return exchange(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.back(gradients[0], ctx.group), None, None, None


def _view_unchanged(x: Tensor, _: Group) -> Tensor:
    # A view: a function of autograd may not return its input itself.
    return x.view_as(x)


def _all_reduce(x: Tensor, group: Group) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group.handle)
    return x


def _all_gather(x: Tensor, group: Group) -> Tensor:
    return start_all_gather(x, group).wait()


def _reduce_scatter(x: Tensor, group: Group) -> Tensor:
    return start_reduce_scatter(x, group).wait()


def _take_local_rows(x: Tensor, group: Group) -> Tensor:
    return x.contiguous().view(group.size, -1, *x.shape[1:])[group.rank].clone()


def _all_to_all(x: Tensor, group: Group, *, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    received_rows = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(received_rows, x.contiguous(), list(received), list(sent), group=group.handle)
    return received_rows


def _all_gather_uneven(x: Tensor, group: Group, *, counts: Sequence[int]) -> Tensor:
    """Send all rows to all ranks by an all-to-all: gloo gathers equal shares only."""
    if not x.is_cuda:
        # gloo's all-to-all takes one tensor, so the rows are repeated for each rank.
        repeated = x.repeat(group.size, *(1,) * (x.dim() - 1))
        return _all_to_all(repeated, group, sent=[len(x)] * group.size, received=counts)
    gathered = x.new_empty((sum(counts), *x.shape[1:]))
    dist.all_to_all(list(gathered.split(list(counts))), [x.contiguous()] * group.size, group=group.handle)
    return gathered


def _reduce_scatter_uneven(x: Tensor, group: Group, *, counts: Sequence[int]) -> Tensor:
    local_count = counts[group.rank]
    parts = _all_to_all(x, group, sent=counts, received=[local_count] * group.size).view(
        group.size, local_count, *x.shape[1:]
    )
    # An addition of two takes half the time of a sum, and also rounds once.
    return parts[0] + parts[1] if group.size == 2 else parts.sum(0)
