"""The router's float32 product on tensor cores, its choices and their weights, and the counts of both.

Products of two bfloat16 numbers are exact in float32, which tensor cores add up in. A float32 gradient is three
bfloat16 numbers (8 bits of its 24 each), so its products are three products side by side.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_PARTS = 3
BLOCK, TILE_ELEMENTS = 1024, 4096
# Of logits that a program holds while it looks for the largest, one by one.
ROUTED_ELEMENTS = 2048


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """Twin of `routing.plain_wide_product` for bfloat16 x [t, h] and weight [E, h]. float32 [t, E]"""
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def split_gradient(gradient: Tensor) -> Tensor:
    """Cut a gradient of the logits into three blocks, of which it is the sum. float32 [t, E] -> bfloat16 [t, 3 E]"""
    tokens, experts = gradient.shape
    split = torch.empty(tokens, _PARTS * experts, dtype=torch.bfloat16, device=gradient.device)
    if gradient.numel():
        _split_kernel[(triton.cdiv(gradient.numel(), BLOCK),)](
            gradient.contiguous(), split, gradient.numel(), experts, BLOCK
        )
    return split


def input_gradient(split: Tensor, weight: Tensor) -> Tensor:
    """Twin of `routing.plain_input_gradient`, of the parts of a gradient. [t, 3 E], [E, h] -> [t, h]"""
    return torch.mm(split, weight.repeat(_PARTS, 1))


def weight_gradient(split: Tensor, x: Tensor) -> Tensor:
    """Twin of `routing.plain_weight_gradient`, of the parts of a gradient. [t, 3 E], [t, h] -> [E, h]"""
    products = torch.mm(split.t(), x, out_dtype=torch.float32)
    return products.view(_PARTS, split.shape[1] // _PARTS, -1).sum(0).to(x.dtype)


def route_tokens(
    logits: Tensor, per_token: int, scale: float, renormalized: bool, chosen: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Twin of `routing.plain_route_tokens` for softmax, without groups and bias. Of equals the first are chosen."""
    experts_and_weights: tuple[Tensor, Tensor] = _RouteTokens.apply(logits, per_token, scale, renormalized, chosen)
    return experts_and_weights


class _RouteTokens(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, logits: Tensor, per_token: int, scale: float, renormalized: bool, chosen: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        logits = logits.contiguous()
        tokens, experts = logits.shape
        is_given = chosen is not None
        chosen = logits.new_empty(tokens, per_token, dtype=torch.int64) if chosen is None else chosen.contiguous()
        weights = logits.new_empty(tokens, per_token)
        tile = _choose_tile(experts, ROUTED_ELEMENTS)
        context.options = (per_token, experts, scale, renormalized, *tile)
        if tokens:
            _route_kernel[(triton.cdiv(tokens, tile[0]),)](
                *(logits, chosen, weights, tokens, is_given, *context.options, triton.next_power_of_2(per_token)),
                num_warps=4,
            )
        # Weights that are renormalized depend on chosen logits alone, and tell all of them that their gradient needs.
        context.save_for_backward(chosen, weights, None if renormalized else logits)
        context.mark_non_differentiable(chosen)
        return chosen, weights

    @staticmethod
    def backward(context: Any, _: Tensor, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        chosen, weights, logits = context.saved_tensors
        tokens, experts = len(chosen), context.options[1]
        slope = weights.new_empty(tokens, experts)
        if tokens:
            rows = _choose_tile(experts, ROUTED_ELEMENTS)[0]
            tensors = (weights if logits is None else logits, chosen, weights, gradient.contiguous(), slope)
            _route_backward_kernel[(triton.cdiv(tokens, rows),)](*tensors, tokens, *context.options, num_warps=4)
        return slope, None, None, None, None


def _choose_tile(experts: int, elements: int) -> tuple[int, int]:
    """Tokens, and columns for their logits, of one program that holds as many elements."""
    columns = triton.next_power_of_2(experts)
    return max(1, elements // columns), columns


def document_counts(
    experts: Tensor, segments: Tensor | None, documents: int, expert_count: int, counted: Tensor | None
) -> Tensor:
    """Twin of `routing.plain_document_counts`. Whole numbers are added in any order."""
    experts = experts.contiguous()
    counts = torch.zeros(documents, expert_count, device=experts.device)
    if experts.numel():
        choices, per_token = experts.numel(), experts.shape[1]
        # What is not there is not read.
        of_tokens = (experts if segments is None else segments, experts if counted is None else counted)
        has_inputs = (segments is not None, counted is not None)
        _count_kernel[(triton.cdiv(choices, BLOCK),)](
            experts, *of_tokens, counts, choices, per_token, expert_count, *has_inputs, BLOCK
        )
    return counts


def entropy_sums(logits: Tensor, counted: Tensor | None, *, smallest: float | None) -> Tensor:
    """Sum `routing.plain_entropies` over some tokens each. float32 [t, E] -> [programs]

    smallest: what is added to the sum of a token's sigmoids; None for softmax.
    """
    logits = logits.contiguous()
    tokens, experts = logits.shape
    tile = _choose_tile(experts, TILE_ELEMENTS)
    sums = logits.new_empty(triton.cdiv(tokens, tile[0]))
    if len(sums):
        flags = (counted is not None, smallest is not None, smallest or 0.0)
        _entropy_kernel[(len(sums),)](
            logits, logits if counted is None else counted, sums, tokens, experts, *flags, *tile
        )
    return sums


@triton.jit(do_not_specialize=["elements"])
def _split_kernel(gradient, split, elements, experts: tl.constexpr, block: tl.constexpr):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    inside = place < elements
    remainder = tl.load(gradient + place, mask=inside, other=0.0)
    target = split + place // experts * (3 * experts) + place % experts
    for part in tl.static_range(3):
        narrow = remainder.to(tl.bfloat16)
        tl.store(target + part * experts, narrow, mask=inside)
        remainder -= narrow.to(tl.float32)


@triton.jit(do_not_specialize=["tokens"])
def _route_kernel(
    logits,
    chosen,
    weights,
    tokens,
    is_given: tl.constexpr,
    per_token: tl.constexpr,
    experts: tl.constexpr,
    scale: tl.constexpr,
    renormalized: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
    places: tl.constexpr,
):
    """Choose the experts of each token, unless they are given, and weigh them."""
    token = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column, place = tl.arange(0, columns), tl.arange(0, places)
    is_token, is_expert = token < tokens, (column < experts)[None, :]
    values = tl.load(logits + token[:, None] * experts + column[None, :], mask=is_token[:, None] & is_expert, other=0.0)
    values = tl.where(is_expert, values, float("-inf"))
    candidates = values
    chosen_logits = tl.full((rows, places), float("-inf"), tl.float32)
    for number in tl.static_range(per_token):
        if is_given:
            expert = tl.load(chosen + token * per_token + number, mask=is_token, other=0).to(tl.int32)
        else:
            # Where logits are no numbers it is any, but one that there is.
            expert = tl.minimum(tl.argmax(candidates, 1).to(tl.int32), experts - 1)
            tl.store(chosen + token * per_token + number, expert.to(tl.int64), mask=is_token)
        is_chosen = column[None, :] == expert[:, None]
        candidates = tl.where(is_chosen, float("-inf"), candidates)
        chosen_logits = tl.where(
            place[None, :] == number, tl.sum(tl.where(is_chosen, values, 0.0), 1)[:, None], chosen_logits
        )
    # Chosen logits that are given may all be far below the largest.
    among = chosen_logits if renormalized else values
    peak = tl.max(among, 1)
    total = tl.sum(tl.exp(among - peak[:, None]), 1)
    shares = tl.exp(chosen_logits - peak[:, None]) / total[:, None] * scale
    inside = is_token[:, None] & (place < per_token)[None, :]
    tl.store(weights + token[:, None] * per_token + place[None, :], shares, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _route_backward_kernel(
    logits,
    chosen,
    weights,
    gradient,
    slope,
    tokens,
    per_token: tl.constexpr,
    experts: tl.constexpr,
    scale: tl.constexpr,
    renormalized: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    """Return the slope of each logit: its share of the weights, less what all shares lose to it."""
    token = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, columns)
    is_token = token < tokens
    inside = is_token[:, None] & (column < experts)[None, :]
    chosen_slopes = tl.zeros((rows, columns), tl.float32)
    shared_loss = tl.zeros((rows,), tl.float32)
    picked = tl.zeros((rows, columns), tl.float32)
    for number in tl.static_range(per_token):
        expert = tl.load(chosen + token * per_token + number, mask=is_token, other=0).to(tl.int32)
        weight = tl.load(weights + token * per_token + number, mask=is_token, other=0.0)
        slope_of = tl.load(gradient + token * per_token + number, mask=is_token, other=0.0)
        is_chosen = column[None, :] == expert[:, None]
        chosen_slopes = tl.where(is_chosen, (weight * slope_of)[:, None], chosen_slopes)
        picked = tl.where(is_chosen, weight[:, None], picked)
        shared_loss += weight * slope_of
    if renormalized:
        shares = picked / scale
    else:
        values = tl.load(logits + token[:, None] * experts + column[None, :], mask=inside, other=float("-inf"))
        exponents = tl.exp(values - tl.max(tl.where(is_token[:, None], values, 0.0), 1)[:, None])
        shares = exponents / tl.where(is_token, tl.sum(exponents, 1), 1.0)[:, None]
    tl.store(
        slope + token[:, None] * experts + column[None, :], chosen_slopes - shares * shared_loss[:, None], mask=inside
    )


@triton.jit(do_not_specialize=["choices"])
def _count_kernel(
    experts,
    segments,
    counted,
    counts,
    choices,
    per_token: tl.constexpr,
    expert_count: tl.constexpr,
    by_document: tl.constexpr,
    has_counted: tl.constexpr,
    block: tl.constexpr,
):
    choice = tl.program_id(0) * block + tl.arange(0, block)
    inside = choice < choices
    expert = tl.load(experts + choice, mask=inside, other=expert_count).to(tl.int32)
    # A choice of none is no choice.
    inside = inside & (expert < expert_count)
    token = choice // per_token
    if has_counted:
        inside = inside & (tl.load(counted + token, mask=inside, other=0) != 0)
    if by_document:
        expert += tl.load(segments + token, mask=inside, other=0).to(tl.int32) * expert_count
    tl.atomic_add(counts + expert, 1.0, mask=inside)


@triton.jit(do_not_specialize=["tokens"])
def _entropy_kernel(
    logits,
    counted,
    sums,
    tokens,
    experts: tl.constexpr,
    has_counted: tl.constexpr,
    of_sigmoids: tl.constexpr,
    smallest: tl.constexpr,
    rows: tl.constexpr,
    columns: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * rows + tl.arange(0, rows)
    column = tl.arange(0, columns)
    inside = (token < tokens)[:, None] & (column < experts)[None, :]
    values = tl.load(logits + token[:, None] * experts + column[None, :], mask=inside, other=0.0)
    if of_sigmoids:
        scores = 1.0 / (1.0 + tl.exp(-values))
    else:
        scores = tl.exp(values - tl.max(tl.where(inside, values, float("-inf")), 1)[:, None])
    scores = tl.where(inside, scores, 0.0)
    total = tl.sum(scores, 1)
    if of_sigmoids:
        total += smallest
    # Behind the last token there is nothing to divide by.
    shares = scores / tl.where(token < tokens, total, 1.0)[:, None]
    entropies = tl.sum(tl.where(shares > 0.0, -shares * tl.log(shares), 0.0), 1)
    if has_counted:
        entropies = tl.where(tl.load(counted + token, mask=token < tokens, other=0) != 0, entropies, 0.0)
    tl.store(sums + tl.program_id(0), tl.sum(tl.where(token < tokens, entropies, 0.0), 0))
