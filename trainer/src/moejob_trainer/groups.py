"""The groups of ranks that share something, and the exchanges inside them that gradients flow back through.

Knows torch.distributed only: who belongs to a group is for moejob_trainer.megatron.topology to say.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

# torch 2.11 has them under their other names.
_all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that share something; a group of one never communicates."""

    rank: int = 0
    size: int = 1
    handle: dist.ProcessGroup | None = None


ALONE = Group()


@dataclass(frozen=True, slots=True)
class Groups:
    """Every group that this rank belongs to. Experts divide the ranks of a stage a second time."""

    tensor: Group = ALONE
    context: Group = ALONE
    data: Group = ALONE
    pipeline: Group = ALONE
    # Ranks with the same dense weights: they see other documents, or other parts of the same ones.
    replicas: Group = ALONE
    expert: Group = ALONE
    expert_tensor: Group = ALONE
    expert_replicas: Group = ALONE
    world: Group = ALONE


# --- what has no gradient -------------------------------------------------------------------------------------------


def total(value: Tensor, group: Group) -> Tensor:
    """The sum over the group, in place."""
    if group.size > 1:
        dist.all_reduce(value, group=group.handle)
    return value


def row_counts(count: Tensor, group: Group) -> Tensor:
    """What every rank of the group counted: [size, *count.shape]."""
    if group.size == 1:
        return count.unsqueeze(0)
    everyones = count.new_empty(group.size * count.numel())
    _all_gather_single(everyones, count.flatten(), group=group.handle)
    return everyones.view(group.size, *count.shape)


@dataclass(frozen=True, slots=True)
class Moving:
    """Rows that ranks exchange while this one computes something else."""

    rows: Tensor
    # What is sent must live until it has been.
    sent: Tensor
    work: dist.Work | None

    def arrived(self) -> Tensor:
        """The rows, once they are here."""
        if self.work is not None:
            self.work.wait()
        return self.rows


def gathering(x: Tensor, group: Group) -> Moving:
    """The rows of all ranks, in the order of ranks, on their way."""
    everyones, sent = x.new_empty((group.size * x.shape[0], *x.shape[1:])), x.contiguous()
    return Moving(everyones, sent, _all_gather_single(everyones, sent, group=group.handle, async_op=True))


def scattering(x: Tensor, group: Group) -> Moving:
    """This rank's share of the rows, summed over the group, on its way."""
    share, sent = x.new_empty((x.shape[0] // group.size, *x.shape[1:])), x.contiguous()
    return Moving(share, sent, _reduce_scatter_single(share, sent, group=group.handle, async_op=True))


# --- what gradients flow back through -------------------------------------------------------------------------------


def copied(x: Tensor, group: Group) -> Tensor:
    """The same on every rank; each rank uses it differently, so gradients are summed."""
    return _through(x, group, _same, _all_reduce)


def summed(x: Tensor, group: Group) -> Tensor:
    """The sum over the group; every rank goes on with it alike."""
    return _through(x, group, _all_reduce, _same)


def gathered(x: Tensor, group: Group) -> Tensor:
    """The rows of all ranks, in the order of ranks; each rank uses them differently, so gradients are summed."""
    return _through(x, group, _all_gather, _reduce_scatter)


def gathered_alike(x: Tensor, group: Group) -> Tensor:
    """The rows of all ranks; every rank goes on with them alike, so that its own rows' gradient is already whole."""
    return _through(x, group, _all_gather, _share)


def scattered(x: Tensor, group: Group) -> Tensor:
    """This rank's share of the rows, summed over the group."""
    return _through(x, group, _reduce_scatter, _all_gather)


def own_rows(x: Tensor, group: Group) -> Tensor:
    """This rank's share of rows that are the same on every rank."""
    return _through(x, group, _share, _all_gather)


def exchanged(x: Tensor, sent: Sequence[int], received: Sequence[int], group: Group) -> Tensor:
    """Rows sent to each rank of the group, and those that came from each, in the order of ranks."""
    there = partial(_all_to_all, sent=sent, received=received)
    back = partial(_all_to_all, sent=received, received=sent)
    return _through(x, group, there, back)


def gathered_unevenly(x: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    """The rows of all ranks, of which each has another number; gradients are summed."""
    if group.size == 1:
        return x
    # An exchange in which everybody gets everything: gloo gathers equal shares only.
    return exchanged(x.repeat(group.size, *(1,) * (x.dim() - 1)), [len(x)] * group.size, counts, group)


def scattered_unevenly(x: Tensor, counts: Sequence[int], group: Group) -> Tensor:
    """This rank's share of the rows, summed over the group, where each rank has another number of them."""
    if group.size == 1:
        return x
    own = counts[group.rank]
    return exchanged(x, counts, [own] * group.size, group).view(group.size, own, *x.shape[1:]).sum(0)


Exchange = Callable[[Tensor, Group], Tensor]


def _through(x: Tensor, group: Group, there: Exchange, back: Exchange) -> Tensor:
    """What `there` makes of x; its gradient goes `back`."""
    if group.size == 1:
        return x
    result: Tensor = _Exchanged.apply(x, group, there, back)  # type: ignore[no-untyped-call]
    return result


class _Exchanged(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Group, there: Exchange, back: Exchange) -> Tensor:
        ctx.group, ctx.back = group, back
        return there(x, group)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return ctx.back(gradients[0], ctx.group), None, None, None


def _same(x: Tensor, _: Group) -> Tensor:
    # A view: a function of autograd may not hand its input on as its output.
    return x.view_as(x)


def _all_reduce(x: Tensor, group: Group) -> Tensor:
    x = x.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(x, group=group.handle)
    return x


def _all_gather(x: Tensor, group: Group) -> Tensor:
    return gathering(x, group).arrived()


def _reduce_scatter(x: Tensor, group: Group) -> Tensor:
    return scattering(x, group).arrived()


def _share(x: Tensor, group: Group) -> Tensor:
    return x.contiguous().view(group.size, -1, *x.shape[1:])[group.rank].clone()


def _all_to_all(x: Tensor, group: Group, *, sent: Sequence[int], received: Sequence[int]) -> Tensor:
    arrived = x.new_empty((sum(received), *x.shape[1:]))
    dist.all_to_all_single(arrived, x.contiguous(), list(received), list(sent), group=group.handle)
    return arrived
