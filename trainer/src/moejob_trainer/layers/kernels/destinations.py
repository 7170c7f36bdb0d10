"""The ranks that choices take tokens to, and what travels with these: a kernel each, where torch asks for a dozen."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 256


def destinations(chosen: Tensor, experts: int, ranks: int) -> tuple[Tensor, Tensor]:
    """Twin of `destinations.plain_destinations`."""
    chosen, (tokens, per_token) = chosen.contiguous(), chosen.shape
    found = torch.empty_like(chosen)
    counts = torch.zeros(2, ranks, dtype=torch.int64, device=chosen.device)
    if chosen.numel():
        tile = _tile(per_token)
        _find[(triton.cdiv(tokens, tile[0]),)](
            chosen, found, counts, tokens, per_token, experts, ranks, *tile, num_warps=4
        )
    return found, counts


def choices_sent(chosen: Tensor, probabilities: Tensor, order: Tensor, experts: int) -> Tensor:
    """Twin of `destinations.plain_choices_sent`."""
    chosen, probabilities, per_token = chosen.contiguous(), probabilities.contiguous(), chosen.shape[1]
    both = probabilities.new_empty(len(order), 2 * per_token)
    if len(order):
        tile = _tile(per_token)
        _send[(triton.cdiv(len(order), tile[0]),)](
            chosen, probabilities, order, both, len(order), per_token, experts, *tile, num_warps=4
        )
    return both


def _tile(per_token: int) -> tuple[int, int]:
    """Tokens or rows of one program, and places for the choices of each."""
    places = triton.next_power_of_2(per_token)
    return max(1, BLOCK // places), places


@triton.jit(do_not_specialize=["tokens"])
def _find(
    chosen,
    found,
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
        other = tl.load(chosen + token * per_token + number, mask=token < tokens, other=ranks * experts) // experts
        is_later = is_later | ((other[:, None] == owner) & (number < place)[None, :])
    rank = tl.where(is_later, ranks, owner)
    tl.store(found + cell, rank, mask=inside)
    one = tl.full((rows, places), 1, tl.int64)
    tl.atomic_add(counts + rank, one, mask=inside & (rank < ranks))
    tl.atomic_add(counts + ranks + owner, one, mask=inside & (owner < ranks))


@triton.jit(do_not_specialize=["row_count"])
def _send(
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
    own = tl.load(chosen + cell, mask=inside, other=0) - (owner * experts)[:, None]
    own = tl.where((own < 0) | (own > experts), experts, own)
    values = tl.load(probabilities + cell, mask=inside, other=0.0)
    into = both + row[:, None] * (2 * per_token) + place[None, :]
    tl.store(into, values, mask=inside)
    tl.store(into + per_token, own.to(both.dtype.element_ty), mask=inside)
