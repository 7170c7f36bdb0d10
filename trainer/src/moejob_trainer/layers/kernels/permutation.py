"""The order of choices by expert, and the sum of each token's rows.

Choices are sorted by counting: those of each expert in each block of choices, their sums over the blocks before, and
their places within the block. A sort by torch asks for 20 kernels, which keep the host busy for longer than the GPU.
Rows are read where they lie: adding them to tokens one by one is sixteen times slower.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048
# Choices whose places one program finds by comparing all pairs.
CHOICES = 128
# A program holds a count for each expert.
MOST_EXPERTS = 4096


def can_order(experts: Tensor, expert_count: int) -> bool:
    """Return whether `order_choices` takes as many choices and experts."""
    return experts.numel() > 0 and expert_count < MOST_EXPERTS


def order_choices(experts: Tensor, expert_count: int) -> tuple[Tensor, Tensor, Tensor]:
    """Twin of `permutation.plain_order_choices`."""
    experts = experts.contiguous()
    choices = experts.numel()
    blocks = triton.cdiv(choices, CHOICES)
    counts = torch.empty(expert_count + 1, blocks, dtype=torch.int32, device=experts.device)
    width = triton.next_power_of_2(expert_count + 2)
    _count_kernel[(blocks,)](experts, counts, choices, blocks, expert_count, width, CHOICES, num_warps=4)
    before = counts.view(-1).cumsum(0, dtype=torch.int32)
    order = torch.empty(choices, dtype=torch.int64, device=experts.device)
    inverse = torch.empty_like(experts, dtype=torch.int64)
    bounds = torch.empty(expert_count + 1, dtype=torch.int32, device=experts.device)
    _place_kernel[(blocks,)](
        experts, before, counts, order, inverse, bounds, choices, blocks, expert_count, width, CHOICES, num_warps=4
    )
    return order, inverse, bounds


def sum_rows(rows: Tensor, inverse: Tensor, target: Tensor | None = None) -> Tensor:
    """Twin of `permutation.plain_sum_token_rows`; the sums are written into contiguous memory where some is given."""
    rows, inverse = rows.contiguous(), inverse.contiguous()
    (tokens, choices), width = inverse.shape, rows.shape[1]
    sums = rows.new_empty(tokens, width) if target is None else target
    block = min(BLOCK, triton.next_power_of_2(width))
    if sums.numel():
        _sum_rows_kernel[(tokens, triton.cdiv(width, block))](
            rows, inverse, sums, rows.shape[0], width, choices, block, num_warps=8
        )
    return sums


@triton.jit(do_not_specialize=["choices", "blocks"])
def _count_kernel(
    experts, counts, choices, blocks, expert_count: tl.constexpr, width: tl.constexpr, block: tl.constexpr
):
    """Count the choices of each expert, and of none, in each block. counts [expert_count + 1, blocks]"""
    program = tl.program_id(0)
    choice = program * block + tl.arange(0, block)
    # Places behind the last choice go into the last bin, which the store leaves out.
    expert = tl.load(experts + choice, mask=choice < choices, other=width - 1).to(tl.int32)
    counter = tl.arange(0, width)
    tl.store(counts + counter * blocks + program, tl.histogram(expert, width), mask=counter <= expert_count)


@triton.jit(do_not_specialize=["choices", "blocks"])
def _place_kernel(
    experts,
    before,
    counts,
    order,
    inverse,
    bounds,
    choices,
    blocks,
    expert_count: tl.constexpr,
    width: tl.constexpr,
    block: tl.constexpr,
):
    """Find the row of each choice. before: counts added up, each with all before it; counts: of one block, at its end.

    Places of choices of none begin behind all rows; their inverse points there.
    """
    program = tl.program_id(0)
    lane = tl.arange(0, block)
    choice = program * block + lane
    inside = choice < choices
    expert = tl.load(experts + choice, mask=inside, other=width - 1).to(tl.int32)
    is_earlier = (expert[:, None] == expert[None, :]) & (lane[None, :] < lane[:, None])
    among = tl.sum(is_earlier.to(tl.int32), 1)
    cell = expert * blocks + program
    first = tl.load(before + cell, mask=inside, other=0) - tl.load(counts + cell, mask=inside, other=0)
    row = first + among
    tl.store(order + row, choice.to(tl.int64), mask=inside)
    rows = tl.load(before + expert_count * blocks - 1)
    tl.store(inverse + choice, tl.where(expert == expert_count, rows, row).to(tl.int64), mask=inside)
    if program == 0:
        counter = tl.arange(0, width)
        ends = tl.load(before + counter * blocks - 1, mask=(counter > 0) & (counter <= expert_count), other=0)
        tl.store(bounds + counter, ends, mask=counter <= expert_count)


@triton.jit(do_not_specialize=["row_count"])
def _sum_rows_kernel(rows, inverse, sums, row_count, width: tl.constexpr, choices: tl.constexpr, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    total = tl.zeros((block,), tl.float32)
    for choice in tl.static_range(choices):
        # A choice of none points behind the last row.
        row = tl.load(inverse + token * choices + choice).to(tl.int64)
        total += tl.load(rows + row * width + columns, mask=inside & (row < row_count), other=0.0).to(tl.float32)
    tl.store(sums + token * width + columns, total.to(sums.dtype.element_ty), mask=inside)
