"""The ranks that choices take tokens to, and what travels with these: a kernel each, where torch asks for a dozen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


def find_destinations(chosen: Tensor, experts: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Twin of `destinations.plain_destinations`."""
    chosen, (tokens, per_token) = chosen.contiguous(), chosen.shape
    destination_ranks = torch.empty_like(chosen)
    counts = torch.zeros(2, ranks, dtype=torch.int64, device=chosen.device)
    if chosen.numel():
        tile = _choose_tile(per_token)
        _destinations_kernel[(triton.cdiv(tokens, tile[0]),)](
            chosen, destination_ranks, counts, tokens, per_token, experts, ranks, *tile, num_warps=4
        )
    return destination_ranks, counts


def pack_choices(chosen: Tensor, probabilities: Tensor, order: Tensor, experts: int) -> Tensor:
    """Twin of `destinations.plain_pack_choices`."""
    chosen, probabilities, per_token = chosen.contiguous(), probabilities.contiguous(), chosen.shape[1]
    both = probabilities.new_empty(len(order), 2 * per_token)
    if len(order):
        tile = _choose_tile(per_token)
        _choices_kernel[(triton.cdiv(len(order), tile[0]),)](
            chosen, probabilities, order, both, len(order), per_token, experts, *tile, num_warps=4
        )
    return both


def _choose_tile(per_token: int) -> tuple[int, int]:
    """Tokens or rows of one program, and places for the choices of each."""
    places = triton.next_power_of_2(per_token)
    return max(1, BLOCK // places), places


@triton.jit(do_not_specialize=["tokens"])
def _destinations_kernel(
    chosen,
    destination_ranks,
    counts,
    tokens,
    per_token: tl.constexpr,
    experts: tl.constexpr,
    ranks: tl.constexpr,
    rows: tl.constexpr,
    places: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    place = tl.arange(0, places)
    inside = (token < tokens)[:, None] & (place < per_token)[None, :]
    cell = token[:, None] * per_token + place[None, :]
    owner = tl.load(chosen + cell, mask=inside, other=ranks * experts) // experts
    is_later = tl.zeros((rows, places), tl.int1)
    for number in tl.static_range(per_token):
        # Of one choice: is it here, and is it earlier?
        earlier_owner = (
            tl.load(chosen + token * per_token + number, mask=token < tokens, other=ranks * experts) // experts
        )
        is_later = is_later | ((earlier_owner[:, None] == owner) & (number < place)[None, :])
    rank = tl.where(is_later, ranks, owner)
    tl.store(destination_ranks + cell, rank, mask=inside)
    ones = tl.full((rows, places), 1, tl.int64)
    tl.atomic_add(counts + rank, ones, mask=inside & (rank < ranks))
    tl.atomic_add(counts + ranks + owner, ones, mask=inside & (owner < ranks))


@triton.jit(do_not_specialize=["row_count"])
def _choices_kernel(
    chosen,
    probabilities,
    order,
    both,
    row_count,
    per_token: tl.constexpr,
    experts: tl.constexpr,
    rows: tl.constexpr,
    places: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    place = tl.arange(0, places)
    inside = (row < row_count)[:, None] & (place < per_token)[None, :]
    choice = tl.load(order + row, mask=row < row_count, other=0)
    owner = tl.load(chosen + choice, mask=row < row_count, other=0) // experts
    cell = (choice // per_token)[:, None] * per_token + place[None, :]
    local_numbers = tl.load(chosen + cell, mask=inside, other=0) - (owner * experts)[:, None]
    local_numbers = tl.where((local_numbers < 0) | (local_numbers > experts), experts, local_numbers)
    values = tl.load(probabilities + cell, mask=inside, other=0.0)
    target = both + row[:, None] * (2 * per_token) + place[None, :]
    tl.store(target, values, mask=inside)
    tl.store(target + per_token, local_numbers.to(both.dtype.element_ty), mask=inside)
