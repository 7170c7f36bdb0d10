"""Rows written into the memory of other ranks, and sums of rows that lie there.

The shares of all ranks are numbered as one: row r of rank n is n * rows + r, where `rows` is how many each share has.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moejob_trainer.layers.kernels import find_kernels
from moejob_trainer.layers.precision import at_least_float32


def write_rows(x: Tensor, places: Tensor, shares: Sequence[Tensor], addresses: Tensor) -> None:
    """Write each token of x [t, h] to its places [t, k]; -1 is none.

    shares [rows, h], by rank; addresses [ranks], where they begin.
    """
    fused = find_kernels("peer_rows", x)
    if fused:
        fused.write_rows(x, places, addresses, shares[0].shape[0])
        return
    plain_write_rows(x, places, shares)


def sum_rows(places: Tensor, shares: Sequence[Tensor], addresses: Tensor) -> Tensor:
    """For each token the sum of the rows at its places [t, k], in float32 and rounded once. [t, h]

    Rows are added in the order of the places, as for the rows of a single rank: the sums agree bit for bit.
    """
    fused = find_kernels("peer_rows", shares[0])
    if fused:
        sums: Tensor = fused.sum_rows(places, addresses, shares[0])
        return sums
    return plain_sum_rows(places, shares)


def plain_write_rows(x: Tensor, places: Tensor, shares: Sequence[Tensor]) -> None:
    """`write_rows` in the operations of torch."""
    rows = shares[0].shape[0]
    for rank, share in enumerate(shares):
        tokens, choices = (places // rows == rank).nonzero(as_tuple=True)
        share[places[tokens, choices] % rows] = x[tokens]


def plain_sum_rows(places: Tensor, shares: Sequence[Tensor]) -> Tensor:
    """`sum_rows` in the operations of torch."""
    rows, width = shares[0].shape
    # One place of every token after the other: the order of additions decides the last bit.
    sums = torch.zeros(len(places), width, dtype=at_least_float32(shares[0][:0]).dtype, device=places.device)
    for column in places.unbind(1):
        rank_rows = torch.zeros_like(sums)
        for rank, share in enumerate(shares):
            tokens = (column // rows == rank).nonzero().squeeze(1)
            rank_rows[tokens] = at_least_float32(share[column[tokens] % rows])
        sums += rank_rows
    return sums.to(shares[0].dtype)
