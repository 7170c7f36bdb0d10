"""Root mean square normalisation in one pass over the rows each way; kept are the input and one number a row."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from moejob_trainer.layers.gradient_sums import GradientSum, find_gradient_sum

TILE_ELEMENTS = 4096
WIDEST = 16384
# The gradient of the weight is summed in this many parts, each by one program.
PARTS = 1056
# Heads lie in a warp, or warps would meet at each row's sums; wide rows need more of them (H200).
NARROW, NARROW_WARPS, WIDE_WARPS = 256, 2, 8


def can_fit_row(x: Tensor) -> bool:
    """Return whether a row fits into one tile."""
    return x.shape[-1] <= WIDEST


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Twin of `norm.plain_rms_norm`."""
    total = find_gradient_sum(weight) if isinstance(weight, nn.Parameter) else None
    output: Tensor = _RMSNorm.apply(x, weight, eps, total)
    return output


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, eps: float, total: GradientSum | None) -> Tensor:
        x, weight = x.contiguous(), weight.contiguous()
        rows, output = x.numel() // x.shape[-1], torch.empty_like(x)
        scales = torch.empty(rows, device=x.device, dtype=torch.float32)
        context.save_for_backward(x, weight, scales)
        context.total = total
        if rows:
            tile = _choose_tile(x)
            _forward_kernel[(triton.cdiv(rows, tile[0]),)](
                x, weight, output, scales, rows, eps, x.shape[-1], *tile, num_warps=4
            )
        return output

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        x, weight, scales = context.saved_tensors
        rows, slope, tile = scales.shape[0], torch.empty_like(x), _choose_tile(x)
        parts = min(PARTS, triton.cdiv(rows, tile[0]))
        weight_slopes = torch.empty(parts, x.shape[-1], device=x.device, dtype=torch.float32)
        if rows:
            tensors = (x, weight, scales, gradient.contiguous(), slope, weight_slopes)
            warps = NARROW_WARPS if tile[1] <= NARROW else WIDE_WARPS
            _backward_kernel[(parts,)](*tensors, rows, parts, x.shape[-1], *tile, num_warps=warps)
        return slope, _weight_gradient(weight_slopes.sum(0), weight, context.total), None, None


def _weight_gradient(wide_gradient: Tensor, weight: Tensor, total: GradientSum | None) -> Tensor | None:
    """The wide gradient of a weight, added to its sum where there is one."""
    if total is None or total.is_new:
        return wide_gradient.to(weight.dtype)
    total.target_for(weight).add_(wide_gradient)
    return total.mark_added(weight)


def _choose_tile(x: Tensor) -> tuple[int, int]:
    columns = triton.next_power_of_2(x.shape[-1])
    return max(1, TILE_ELEMENTS // columns), columns


@triton.jit(do_not_specialize=["rows"])
def _forward_kernel(
    x, weight, output, scales, rows, eps, width: tl.constexpr, tile_rows: tl.constexpr, tile_columns: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64) * tile_rows + tl.arange(0, tile_rows)
    column = tl.arange(0, tile_columns)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    places = row[:, None] * width + column[None, :]
    values = tl.load(x + places, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(values * values, 1) / width + eps)
    weights = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(output + places, (values * scale[:, None] * weights[None, :]).to(output.dtype.element_ty), mask=inside)
    tl.store(scales + row, scale, mask=row < rows)


@triton.jit(do_not_specialize=["rows", "parts"])
def _backward_kernel(
    x,
    weight,
    scales,
    gradient,
    slope,
    weight_slopes,
    rows,
    parts,
    width: tl.constexpr,
    tile_rows: tl.constexpr,
    tile_columns: tl.constexpr,
):
    part = tl.program_id(0)
    column = tl.arange(0, tile_columns)
    weights = tl.load(weight + column, mask=column < width, other=0.0).to(tl.float32)
    weight_slope = tl.zeros((tile_columns,), tl.float32)
    for tile in range(part, tl.cdiv(rows, tile_rows), parts):
        row = (tile * tile_rows + tl.arange(0, tile_rows)).to(tl.int64)
        inside = (row < rows)[:, None] & (column < width)[None, :]
        places = row[:, None] * width + column[None, :]
        scale = tl.load(scales + row, mask=row < rows, other=0.0)
        normal = tl.load(x + places, mask=inside, other=0.0).to(tl.float32) * scale[:, None]
        upstream = tl.load(gradient + places, mask=inside, other=0.0).to(tl.float32)
        weighted = upstream * weights[None, :]
        mean = tl.sum(normal * weighted, 1) / width
        value = (weighted - normal * mean[:, None]) * scale[:, None]
        tl.store(slope + places, value.to(slope.dtype.element_ty), mask=inside)
        weight_slope += tl.sum(upstream * normal, 0)
    tl.store(weight_slopes + part * width + column, weight_slope, mask=column < width)
