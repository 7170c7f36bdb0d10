"""Rounding to FP8 by rows and by columns, and products of rounded numbers by quack-kernels.

Its products take FP8 numbers and a function over the sums; our function multiplies the sums by the scales of both
sides. Tensor cores, which keep fewer bits, add up 128 products at a time; the sums of these are added in float32.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moejob_trainer.layers import float8
from moejob_trainer.layers.kernels.quack import (
    TRIED_ROWS,
    Tiles,
    can_multiply_rows,
    draw_numbers,
    exact_products,
    is_accurate,
    load_module,
    trial_bounds,
)

OTHERWISE = "FP8 saves no time"
LARGEST, SMALLEST = tl.constexpr(float8.LARGEST), tl.constexpr(float8.SMALLEST)
EXPONENT_BITS = tl.constexpr(float8.EXPONENT_BITS)
WIDEST_BLOCK = 4096
# What one program turns at a time.
TURNED_ROWS, TURNED_COLUMNS = 128, 64
# Chosen from eleven (benchmarks/training-gpu.md) with exact sums, which take registers of their own.
GROUPED_TILES = Tiles(192, 128, pingpong=False, cluster_rows=1, cluster_columns=2)
DENSE_TILES = Tiles(128, 192, pingpong=False, cluster_rows=2, cluster_columns=1)
TRIED_INPUTS, TRIED_OUTPUTS = 272, 400


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Twin of `float8.plain_quantize_rows`."""
    values, scales = torch.empty_like(x, dtype=float8.FLOAT8), x.new_empty(x.shape[:-1], dtype=torch.float32)
    width = x.shape[-1]
    block = min(triton.next_power_of_2(width), WIDEST_BLOCK)
    if scales.numel():
        _quantize_rows_kernel[(scales.numel(),)](
            x, values, scales, width, block, num_warps=4 if block < WIDEST_BLOCK else 8
        )
    return values, scales


def quantize_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """Twin of `float8.plain_quantize_columns`."""
    *leading, rows, width = x.shape
    values = x.new_empty(*leading, width, rows, dtype=float8.FLOAT8)
    scales = x.new_empty(*leading, width, dtype=torch.float32)
    matrices = x.numel() // max(rows * width, 1)
    if matrices:
        grid = (triton.cdiv(width, TURNED_COLUMNS), matrices)
        _quantize_columns_kernel[grid](x, values, scales, rows, width, TURNED_ROWS, TURNED_COLUMNS, num_warps=4)
    return values, scales


def can_multiply(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether `dense_product` and `grouped_products` take rows like these, and give this type."""
    return can_multiply_rows(x, dtype) and _is_product_verified(x.device)


def dense_product(x: Tensor, of_rows: Tensor, weight: Tensor, of_columns: Tensor) -> Tensor:
    """x [t, k] by weight [n, k], times the scales of both [t] and [n]. [t, n]"""
    out = x.new_empty(len(x), len(weight), dtype=torch.bfloat16)
    scales = {"of_rows": of_rows.unsqueeze(0), "of_columns": of_columns.unsqueeze(0)}
    _load_scaled_gemm().gemm(x, weight, out, epi_args=scales, **_tile_settings(DENSE_TILES))
    return out


def grouped_products(x: Tensor, of_rows: Tensor, weights: Tensor, of_columns: Tensor, bounds: Tensor) -> Tensor:
    """The same over rows of many experts: weights [e, n, k], scales [r] and [e, n], bounds int32 [e + 1]. [r, n]"""
    out = x.new_empty(len(x), weights.shape[1], dtype=torch.bfloat16)
    scales = {"of_rows": of_rows, "of_columns": of_columns}
    _load_scaled_gemm().gemm(x, weights, out, epi_args=scales, cu_seqlens_m=bounds, **_tile_settings(GROUPED_TILES))
    return out


def _tile_settings(tiles: Tiles) -> dict[str, Any]:
    return {
        "tile_M": tiles.rows,
        "tile_N": tiles.columns,
        "pingpong": tiles.pingpong,
        "cluster_M": tiles.cluster_rows,
        "cluster_N": tiles.cluster_columns,
    }


@cache
def _load_scaled_gemm() -> Any:
    """Products with the scales of both sides on them; None without quack-kernels."""
    epilogue, ops = load_module("epilogue.frontend", OTHERWISE), load_module("epilogue.ops", OTHERWISE)
    if epilogue is None or ops is None:
        return None
    sides = {"of_rows": ops.ColVecLoad("of_rows"), "of_columns": ops.RowVecLoad("of_columns")}
    return epilogue.gemm_epilogue(ops=sides)(_scale_sums)


def _scale_sums(acc: Any, of_rows: Any, of_columns: Any) -> dict[str, Any]:
    """Multiply sums by the scales of both sides; quack-kernels names the first argument."""
    return {"D": acc * of_rows * of_columns}


@cache
def _is_product_verified(device: torch.device) -> bool:
    if _load_scaled_gemm() is None:
        return False
    shapes = ((sum(TRIED_ROWS), TRIED_INPUTS), (len(TRIED_ROWS), TRIED_OUTPUTS, TRIED_INPUTS))
    x, weights = (quantize_rows(numbers) for numbers in draw_numbers(device, *shapes))
    rows, matrices = (values.double() * scales.double().unsqueeze(-1) for values, scales in (x, weights))
    grouped = grouped_products(*x, *weights, trial_bounds(device))
    dense = dense_product(*x, weights[0][0], weights[1][0])
    return is_accurate(grouped, exact_products(rows, matrices.transpose(1, 2)), OTHERWISE) and is_accurate(
        dense, rows @ matrices[0].t(), OTHERWISE
    )


@triton.jit
def _scale_factor(largest):
    """The largest power of two by which a row may be multiplied."""
    quotient = tl.div_rn(LARGEST, tl.maximum(largest, SMALLEST))
    return (quotient.to(tl.int32, bitcast=True) & EXPONENT_BITS).to(tl.float32, bitcast=True)


@triton.jit
def _quantize_rows_kernel(x, values, scales, width: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    largest = tl.zeros((block,), tl.float32)
    for first in range(0, width, block):
        columns = first + tl.arange(0, block)
        part = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, tl.abs(part))
    upwards = _scale_factor(tl.max(largest, 0))
    tl.store(scales + row, 1.0 / upwards)
    for first in range(0, width, block):
        columns = first + tl.arange(0, block)
        part = tl.load(x + row * width + columns, mask=columns < width, other=0.0).to(tl.float32)
        tl.store(values + row * width + columns, (part * upwards).to(values.dtype.element_ty), mask=columns < width)


@triton.jit
def _quantize_columns_kernel(x, values, scales, rows, width, block_rows: tl.constexpr, block_columns: tl.constexpr):
    matrix = tl.program_id(1).to(tl.int64)
    columns = tl.program_id(0) * block_columns + tl.arange(0, block_columns)
    x += matrix * rows * width
    largest = tl.zeros((block_columns,), tl.float32)
    for first in range(0, rows, block_rows):
        row = first + tl.arange(0, block_rows)
        inside = (row < rows)[:, None] & (columns < width)[None, :]
        part = tl.load(x + row[:, None].to(tl.int64) * width + columns[None, :], mask=inside, other=0.0)
        largest = tl.maximum(largest, tl.max(tl.abs(part.to(tl.float32)), 0))
    upwards = _scale_factor(largest)
    tl.store(scales + matrix * width + columns, 1.0 / upwards, mask=columns < width)
    values += matrix * rows * width
    for first in range(0, rows, block_rows):
        row = first + tl.arange(0, block_rows)
        inside = (row < rows)[:, None] & (columns < width)[None, :]
        part = tl.load(x + row[:, None].to(tl.int64) * width + columns[None, :], mask=inside, other=0.0)
        turned = tl.trans((part.to(tl.float32) * upwards[None, :]).to(values.dtype.element_ty))
        place = values + columns[:, None].to(tl.int64) * rows + row[None, :]
        tl.store(place, turned, mask=tl.trans(inside))
