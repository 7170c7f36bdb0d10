"""The way of tokens through memory that all ranks of an expert group write to: one kernel out, one back.

Out, each token is stored at its final row on every rank that needs it; the gather before an all-to-all is in it. Back,
each token loads what the ranks made of it and adds that in float32; the sum behind an all-to-all is in it. Either
direction is the other's gradient. Rows lie in the memory in the order in which an all-to-all brings them, and are added
in the order of a token's choices: results are those of AllToAll to the last bit, sums of gradients included.

    barrier   no rank reads any more what an exchange before left in its memory
    write     into that of others (out), or into its own (back)
    barrier   everything is written
    read      from its own (out), or from that of others (back)

Nothing that lies there outlives an exchange: it is gathered into the order of experts, or copied, at once. So all
layers, micro batches, stages and passes that are computed again share one memory; only their order has to be the same
on every rank, as for any collective.
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
    # Rows are permuted by expert on their way out of the memory and into it: as they came they lie nowhere else.
    is_fused: bool


def peer_places(destinations: Tensor, permutation: Permutation, starts: Tensor, rows: int) -> Tensor:
    """Number the row of each choice in the memory of all ranks, whose shares have `rows` each. int64 [t, k]

    destinations [t, k]: the rank of each choice, or how many there are for none. permutation: of them. starts [ranks]:
    rows that the ranks before this one write to each. Rank 1 of two sends tokens 0 and 2 to rank 0, where three rows of
    rank 0 come first: their places are 3 and 4, and those of what it sends to rank 1 begin at `rows`.
    """
    first = permutation.bounds[:-1]
    ranks = len(first)
    shift = starts - first + rows * torch.arange(ranks, device=starts.device)
    places = permutation.inverse + shift[destinations.clamp(max=ranks - 1)]
    return places.masked_fill(destinations == ranks, -1)


def send_to_peers(x: Tensor, route: PeerRoute, order: Permutation | None = None) -> Tensor:
    """Tokens x [t, h] sent to their places, and the rows that came: as they lie, or permuted by `order`."""
    rows: Tensor = _SendToPeers.apply(x, route, order)
    return rows


def sum_from_peers(y: Tensor, route: PeerRoute, order: Permutation | None = None) -> Tensor:
    """For each token the sum of what ranks have at its places; y is what lies here, or what `order` combines to it."""
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
