"""Rows stored into the memory of other GPUs, and sums of rows loaded from there; what lies between is NVLink.

A token is read once and stored to all ranks that need it: a gather before an all-to-all reads it once for each.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


def write_rows(x: Tensor, places: Tensor, addresses: Tensor, rows: int) -> None:
    """Twin of `peer_rows.plain_write_rows`, for shares of `rows` rows."""
    x, places = x.contiguous(), places.contiguous()
    (tokens, choices), width = places.shape, x.shape[1]
    block = min(BLOCK, triton.next_power_of_2(width))
    if x.numel():
        grid = tokens, triton.cdiv(width, block)
        _write_rows_kernel[grid](x, places, addresses, rows, width, choices, block, num_warps=8)


def sum_rows(places: Tensor, addresses: Tensor, like: Tensor) -> Tensor:
    """Twin of `peer_rows.plain_sum_rows`; `like` is any of the shares."""
    places = places.contiguous()
    (tokens, choices), (rows, width) = places.shape, like.shape
    sums = torch.empty((tokens, width), dtype=like.dtype, device=like.device)
    block = min(BLOCK, triton.next_power_of_2(width))
    if sums.numel():
        grid = tokens, triton.cdiv(width, block)
        _sum_rows_kernel[grid](places, addresses, sums, rows, width, choices, block, num_warps=8)
    return sums


@triton.jit(do_not_specialize=["rows"])
def _write_rows_kernel(x, places, addresses, rows, width: tl.constexpr, choices: tl.constexpr, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    values = tl.load(x + token * width + columns, mask=inside)
    for choice in tl.static_range(choices):
        place = tl.load(places + token * choices + choice)
        tl.store(_row_pointer(place, addresses, rows, x, width) + columns, values, mask=inside & (place >= 0))


@triton.jit(do_not_specialize=["rows"])
def _sum_rows_kernel(places, addresses, sums, rows, width: tl.constexpr, choices: tl.constexpr, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    total = tl.zeros((block,), tl.float32)
    for choice in tl.static_range(choices):
        place = tl.load(places + token * choices + choice)
        row = _row_pointer(place, addresses, rows, sums, width)
        # A mask, no branch: all loads of a token are on their way at once.
        total += tl.load(row + columns, mask=inside & (place >= 0), other=0.0).to(tl.float32)
    tl.store(sums + token * width + columns, total.to(sums.dtype.element_ty), mask=inside)


@triton.jit
def _row_pointer(place, addresses, rows, like, width: tl.constexpr):
    place = tl.maximum(place, 0)
    share = tl.load(addresses + place // rows).to(tl.pointer_type(like.dtype.element_ty))
    # Memory is mapped in pages, but of an address that was loaded the compiler knows nothing: it would move one number
    # at a time.
    return tl.multiple_of(share, 16) + (place % rows) * width
