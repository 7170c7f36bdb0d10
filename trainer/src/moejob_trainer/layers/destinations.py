"""The ranks that a token is sent to, one row to each rank with any of its experts, and its choices for that rank.

Token choices [[0, 1], [3, 0]] with 2 experts on each of 2 ranks: owners [[0, 0], [1, 0]]. Token 0 needs one row on rank
0, so its second choice has no destination: [[0, 2], [1, 0]], where 2, the number of ranks, means none. Rank 0 gets 2
rows with 3 choices, rank 1 gets 1 row with 1 choice: [[2, 1], [3, 1]].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moejob_trainer.layers.kernels import find_kernels
from moejob_trainer.layers.permutation import Permutation, combine_rows


def find_destinations(chosen: Tensor, experts: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Return the rank of each choice [t, k], and the rows and choices of each rank. int64 [t, k], int64 [2, ranks]

    Each rank holds `experts` experts. Of a token's choices on one rank only the first sends a row; the others, and a
    choice of no expert (`ranks * experts`), have the destination `ranks`.
    """
    fused = find_kernels("destinations", chosen)
    find = fused.find_destinations if fused else plain_destinations
    ranks_and_counts: tuple[Tensor, Tensor] = find(chosen, experts, ranks)
    return ranks_and_counts


def plain_destinations(chosen: Tensor, experts: int, ranks: int) -> tuple[Tensor, Tensor]:
    """`find_destinations` in the operations of torch."""
    # A choice of no expert, ranks * experts, has the owner `ranks`, which none of the numbers is.
    owners = chosen // experts
    destination_ranks = owners.masked_fill(~_is_first_on_rank(owners), ranks)
    numbers = torch.arange(ranks, device=owners.device)
    return destination_ranks, (
        torch.stack([destination_ranks.flatten(), owners.flatten()]).unsqueeze(-1) == numbers
    ).sum(1)


def pack_choices(chosen: Tensor, probabilities: Tensor, permutation: Permutation, experts: int) -> Tensor:
    """Return for each sent row its token's probabilities and its choices, numbered for the receiver. [rows, 2 k]

    A rank numbers its own experts from 0; `experts` means no expert. The permutation sorts by destination. Both
    travel in one tensor: float32 holds the number of any expert exactly. The probabilities have gradients.
    """
    both: Tensor = _PackChoices.apply(chosen, probabilities, permutation, experts)
    return both


def local_choices(chosen: Tensor, rank: Tensor | int, experts: int) -> Tensor:
    """Return choices of a rank's experts, numbered from its first; `experts`, which means none, for all others."""
    local_numbers = chosen - rank * experts
    # Not >=: the number `experts` means none already.
    return local_numbers.masked_fill((local_numbers < 0) | (local_numbers > experts), experts)


class _PackChoices(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, chosen: Tensor, probabilities: Tensor, permutation: Permutation, experts: int) -> Tensor:
        context.permutation = permutation
        fused = find_kernels("destinations", chosen)
        pack = fused.pack_choices if fused else plain_pack_choices
        both: Tensor = pack(chosen, probabilities, permutation.order, experts)
        return both

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        return None, combine_rows(gradient.chunk(2, -1)[0].contiguous(), context.permutation), None, None


def plain_pack_choices(chosen: Tensor, probabilities: Tensor, order: Tensor, experts: int) -> Tensor:
    """`pack_choices` in the operations of torch; order int64 [rows]: the choice that takes each row."""
    tokens = order // max(chosen.shape[1], 1)
    owners = (chosen.flatten()[order] // experts).unsqueeze(-1)
    local_numbers = local_choices(chosen[tokens], owners, experts)
    return torch.cat([probabilities[tokens], local_numbers.to(probabilities.dtype)], -1)


def _is_first_on_rank(owners: Tensor) -> Tensor:
    """Mark the first choice of each token on each rank. [t, k]"""
    # same[t, i, j]: choices i and j are on one rank. Below the diagonal j comes before i:
    # owners [0, 1, 0] give [True, True, False].
    same = owners.unsqueeze(-1) == owners.unsqueeze(-2)
    return ~same.tril(-1).any(-1)
