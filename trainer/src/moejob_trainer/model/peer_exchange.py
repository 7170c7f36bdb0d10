"""Exchange of tokens through memory that all ranks of an expert group write to: one kernel out, one back.

Out, the kernel stores each token at its final row on every rank that needs it, and so does the gather before an
all-to-all, too. Back, the kernel loads the ranks' outputs for each token and adds them in float32, and so does the sum
behind an all-to-all, too. Either direction is the other's gradient. Rows lie in the memory in an all-to-all's order,
and the kernel adds them in the order of a token's choices: results and sums of gradients equal AllToAll's bit for bit.

    barrier   every rank has read the rows of the previous exchange
    write     to the memory of other ranks (out), or to a rank's own (back)
    barrier   every rank has written
    read      from a rank's own memory (out), or from the memory of other ranks (back)

No row outlives its exchange: each rank at once gathers the rows into the order of experts, or copies them. So all
layers, micro batches, stages and recomputed passes share one memory; only their order has to be the same on every rank,
as for any collective.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moejob_trainer.distributed.peer_memory import PeerMemory
from moejob_trainer.layers.peer_rows import sum_rows, write_rows
from moejob_trainer.layers.permutation import Permutation, sum_rows_into


@dataclass(frozen=True, eq=False)
class PeerRoute:
    """The places of this rank's tokens in the memory of the group, and the number of rows that others write here."""

    memory: PeerMemory
    # int64 [t, k], as `peer_rows` numbers them; -1 for a choice that needs no row.
    places: Tensor
    received: int
    # Rows are permuted by expert on their way out of the memory and into it; no copy keeps the order of arrival.
    is_fused: bool


def peer_places(destinations: Tensor, permutation: Permutation, starts: Tensor, rows: int) -> Tensor:
    """Number the row of each choice in the memory of all ranks, whose shares have `rows` each. int64 [t, k]

    destinations [t, k]: the rank of each choice, or the number of ranks for a choice without one. permutation: sorts
    the destinations. starts [ranks]: rows that lower ranks write to each rank. For example, rank 1 of two sends tokens
    0 and 2 to rank 0, where three rows of rank 0 come first: their places there are 3 and 4. The places of the rows
    that rank 1 keeps begin at `rows`.
    """
    first = permutation.bounds[:-1]
    ranks = len(first)
    shift = starts - first + rows * torch.arange(ranks, device=starts.device)
    places = permutation.inverse + shift[destinations.clamp(max=ranks - 1)]
    return places.masked_fill(destinations == ranks, -1)


def send_to_peers(x: Tensor, route: PeerRoute, order: Permutation | None = None) -> Tensor:
    """Send tokens x [t, h] to their places; return the received rows, as they lie or permuted by `order`."""
    rows: Tensor = _SendToPeers.apply(x, route, order)
    return rows


def sum_from_peers(y: Tensor, route: PeerRoute, order: Permutation | None = None) -> Tensor:
    """Return the sum of the rows at each token's places; y holds this rank's rows, or `order` combines it to them."""
    sums: Tensor = _SumFromPeers.apply(y, route, order)
    return sums


class _SendToPeers(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, route: PeerRoute, order: Permutation | None) -> Tensor:
        context.route, context.order = route, order
        return _exchange_rows(x, route, order)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _exchange_sums(gradient, context.route, context.order), None, None


class _SumFromPeers(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, y: Tensor, route: PeerRoute, order: Permutation | None) -> Tensor:
        context.route, context.order = route, order
        return _exchange_sums(y, route, order)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _exchange_rows(gradient, context.route, context.order), None, None


def _exchange_rows(x: Tensor, route: PeerRoute, order: Permutation | None) -> Tensor:
    memory, shares = route.memory, route.memory.view_as_rows(x.shape[1], x.dtype)
    memory.barrier()
    write_rows(x, route.places, shares, memory.addresses)
    memory.barrier()
    local_rows = shares[memory.rank][: route.received]
    return local_rows.clone() if order is None else local_rows.index_select(0, order.row_tokens)


def _exchange_sums(y: Tensor, route: PeerRoute, order: Permutation | None) -> Tensor:
    memory, shares = route.memory, route.memory.view_as_rows(y.shape[1], y.dtype)
    local_rows = shares[memory.rank][: route.received]
    memory.barrier()
    if order is None:
        local_rows.copy_(y)
    else:
        sum_rows_into(local_rows, y, order)
    memory.barrier()
    return sum_rows(route.places, shares, memory.addresses)
