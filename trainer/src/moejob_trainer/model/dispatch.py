"""The way of tokens to the ranks that hold their experts, and back.

A token travels once to each rank that holds any of its experts, not once for each expert: with 8 choices over 4 ranks
these are 3.6 rows instead of 8. Its choices on that rank and their probabilities travel with it; the rank adds up in
float32 what its experts make of the token, and one row returns. For two ranks of two experts each:

    token 0 chose (0, 1), token 1 chose (3, 0)          here, rank 0
    rows to rank 0: token 0 (0, 1), token 1 (0, none)   rows to rank 1: token 1 (none, 1), counted from its own first
    returned:       from rank 0 y0(0) + y1(0) and y0(1), from rank 1 y3(1); each token adds up what came back

Where several ranks share an expert's matrices, each of them works on the rows of all.

The other way (`all_gather_tokens`, `reduce_scatter_tokens`): every rank gathers the tokens of all and picks those of
its own experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from moejob_trainer.distributed.collectives import (
    all_gather,
    all_gather_counts,
    all_gather_uneven,
    all_to_all,
    reduce_scatter,
    reduce_scatter_uneven,
)
from moejob_trainer.distributed.groups import Groups
from moejob_trainer.layers.permutation import Permutation, combined, permuted


@dataclass(frozen=True, slots=True)
class Sizes:
    """Rows that leave and arrive, by rank, and rows of each rank that shares this one's experts; known to the host."""

    sent: tuple[int, ...]
    received: tuple[int, ...]
    shares: tuple[int, ...]
    # Choices among the rows that arrive, of all ranks that share these experts.
    choices: int


@dataclass(frozen=True, slots=True)
class TokenDispatch:
    """Tokens at a rank that holds some of their experts, and how they got there."""

    rows: Tensor
    # Counted from this rank's first expert; `experts`, which is none, for those of other ranks. [rows, k]
    chosen: Tensor
    probabilities: Tensor
    sizes: Sizes
    # Of the tokens that left, over the ranks.
    permutation: Permutation


def dispatch(x: Tensor, chosen: Tensor, probabilities: Tensor, experts: int, groups: Groups) -> TokenDispatch:
    """Take tokens x [t, h] with their choices and probabilities [t, k] to all ranks that hold `experts` each."""
    owners = chosen // experts
    destinations = owners.masked_fill(~_is_first(owners), groups.expert.size)
    sizes = _sizes(destinations, owners, groups)
    permutation = Permutation.of(destinations, groups.expert.size, sum(sizes.sent))
    here = local_choices(chosen[permutation.tokens], owners.flatten()[permutation.order].unsqueeze(-1), experts)
    rows = _exchanged(permuted(x, permutation), sizes, groups)
    # One exchange for both; float32 holds every number of an expert exactly.
    both = torch.cat([permuted(probabilities, permutation), here.to(probabilities.dtype)], -1)
    probabilities, here = _exchanged(both, sizes, groups).chunk(2, -1)
    return TokenDispatch(rows, here.detach().long(), probabilities, sizes, permutation)


def combine(y: Tensor, sent: TokenDispatch, groups: Groups) -> Tensor:
    """Send outputs back to the ranks of their tokens, and add up those of each token. [t, h]"""
    sizes = sent.sizes
    own = reduce_scatter_uneven(y, sizes.shares, groups.expert_tensor)
    return combined(all_to_all(own, sizes.received, sizes.sent, groups.expert), sent.permutation)


def all_gather_tokens(x: Tensor, groups: Groups) -> Tensor:
    """Gather the rows of all ranks that share experts, each with equally many; gradients are summed."""
    return all_gather(all_gather(x, groups.expert), groups.expert_tensor)


def local_choices(chosen: Tensor, rank: Tensor | int, experts: int) -> Tensor:
    """The choices that fell on a rank's experts, counted from its first; `experts`, which is none, for others."""
    own = chosen - rank * experts
    return own.masked_fill((own < 0) | (own > experts), experts)


def reduce_scatter_tokens(x: Tensor, groups: Groups) -> Tensor:
    """This rank's rows of those that `all_gather_tokens` gathered, summed over the ranks."""
    return reduce_scatter(reduce_scatter(x, groups.expert_tensor), groups.expert)


def _exchanged(rows: Tensor, sizes: Sizes, groups: Groups) -> Tensor:
    wait = all_to_all(rows, sizes.sent, sizes.received, groups.expert)
    return all_gather_uneven(wait, sizes.shares, groups.expert_tensor)


def _is_first(owners: Tensor) -> Tensor:
    """Mark the first choice of each token on each rank. [t, k]"""
    same = owners.unsqueeze(-1) == owners.unsqueeze(-2)
    return ~same.tril(-1).any(-1)


def _sizes(destinations: Tensor, owners: Tensor, groups: Groups) -> Sizes:
    ranks = torch.arange(groups.expert.size, device=owners.device)
    # [rows or choices, to rank]
    counts = (torch.stack([destinations.flatten(), owners.flatten()]).unsqueeze(-1) == ranks).sum(1)
    # [expert tensor, from rank, rows or choices, to rank]
    everyones = all_gather_counts(all_gather_counts(counts, groups.expert), groups.expert_tensor)
    arriving, here = everyones[..., groups.expert.rank], groups.expert_tensor.rank
    sizes = [everyones[here, groups.expert.rank, 0], arriving[here, :, 0], arriving[..., 0].sum(1)]
    # The one wait for the device: sizes have to be known on the host.
    *rows, choices = torch.cat([*sizes, arriving[..., 1].sum().view(1)]).tolist()
    size = groups.expert.size
    return Sizes(tuple(rows[:size]), tuple(rows[size : 2 * size]), tuple(rows[2 * size :]), choices)
