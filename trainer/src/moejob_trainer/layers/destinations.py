"""The ranks that a token is sent to, one row to each rank with any of its experts, and its choices for that rank.

Token choices [[0, 1], [3, 0]] with 2 experts on each of 2 ranks: owners [[0, 0], [1, 0]]. Token 0 needs one row on rank
0, so its second choice has no destination: [[0, 2], [1, 0]], where 2, the number of ranks, means none. Rank 0 gets 2
rows with 3 choices, rank 1 gets 1 row with 1 choice: [[2, 1], [3, 1]].
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moejob_trainer.layers.kernels import kernels
from moejob_trainer.layers.permutation import Permutation, combined


def destinations(chosen: Tensor, experts: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Return the rank of each choice [t, k], and the rows and choices of each rank. int64 [t, k], int64 [2, ranks]

    Each rank holds `experts` experts. Of a token's choices on one rank only the first sends a row; the others, and a
    choice of no expert (`ranks * experts`), have the destination `ranks`.
    """
    fused = kernels("destinations", chosen)
    of = fused.destinations if fused else plain_destinations
    found: tuple[Tensor, Tensor] = of(chosen, experts, ranks)
    return found


def plain_destinations(chosen: Tensor, experts: int, ranks: int) -> tuple[Tensor, Tensor]:
    """`destinations` in the operations of torch."""
    owners = chosen // experts
    found = owners.masked_fill(~_is_first(owners), ranks)
    numbers = torch.arange(ranks, device=owners.device)
    return found, (torch.stack([found.flatten(), owners.flatten()]).unsqueeze(-1) == numbers).sum(1)


def choices_sent(chosen: Tensor, probabilities: Tensor, permutation: Permutation, experts: int) -> Tensor:
    """Return for each sent row its token's probabilities and its choices, numbered for the receiver. [rows, 2 k]

    A rank numbers its own experts from 0; `experts` means none of them. The permutation is the one by destination. Both
    travel in one tensor: float32 holds the number of any expert exactly. The probabilities have gradients.
    """
    both: Tensor = _ChoicesSent.apply(chosen, probabilities, permutation, experts)
    return both


def local_choices(chosen: Tensor, rank: Tensor | int, experts: int) -> Tensor:
    """Return choices of a rank's experts, numbered from its first; `experts`, which means none, for all others."""
    own = chosen - rank * experts
    return own.masked_fill((own < 0) | (own > experts), experts)


class _ChoicesSent(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, chosen: Tensor, probabilities: Tensor, permutation: Permutation, experts: int) -> Tensor:
        context.permutation = permutation
        fused = kernels("destinations", chosen)
        sent = fused.choices_sent if fused else plain_choices_sent
        both: Tensor = sent(chosen, probabilities, permutation.order, experts)
        return both

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[None, Tensor, None, None]:
        return None, combined(gradient.chunk(2, -1)[0].contiguous(), context.permutation), None, None


def plain_choices_sent(chosen: Tensor, probabilities: Tensor, order: Tensor, experts: int) -> Tensor:
    """`choices_sent` in the operations of torch; order int64 [rows]: the choice that takes each row."""
    tokens = order // max(chosen.shape[1], 1)
    owners = (chosen.flatten()[order] // experts).unsqueeze(-1)
    here = local_choices(chosen[tokens], owners, experts)
    return torch.cat([probabilities[tokens], here.to(probabilities.dtype)], -1)


def _is_first(owners: Tensor) -> Tensor:
    """Mark the first choice of each token on each rank. [t, k]"""
    same = owners.unsqueeze(-1) == owners.unsqueeze(-2)
    return ~same.tril(-1).any(-1)
