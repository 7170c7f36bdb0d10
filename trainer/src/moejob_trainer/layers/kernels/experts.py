"""Products of many experts by quack-kernels, which also add weight gradients to their sum inside the product."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from moejob_trainer.layers.kernels import ALIGNMENT_BYTES
from moejob_trainer.layers.kernels.quack import (
    TRIED_ROWS,
    WITHIN,
    Tiles,
    can_multiply_rows,
    draw_numbers,
    exact_products,
    gpu_generation,
    is_accurate,
    load_module,
    trial_bounds,
)

OTHERWISE = "products of experts are torch's"
TRIED_INPUTS, TRIED_OUTPUTS = 264, 392
# Between what widths of both sides of a weight, and from how many rows for each expert, tiles of our own are faster.
WIDE, WIDEST, MANY_ROWS = 4096, 16384, 2048
# The generation that they were measured on.
HOPPER = 9
# benchmarks/training-gpu.md has what was measured.
WIDE_TILES = Tiles(192, 128, pingpong=True, cluster_rows=1, cluster_columns=2)


def choose_tiles(rows_per_expert: float, widths: tuple[int, int], of_generation: int) -> Tiles | None:
    """Return the tiles of products with weights of these widths; None for those that quack-kernels takes itself."""
    is_wide = min(widths) >= WIDE and max(widths) <= WIDEST
    return WIDE_TILES if of_generation == HOPPER and rows_per_expert >= MANY_ROWS and is_wide else None


def can_multiply(x: Tensor, weights: Tensor) -> bool:
    """Return whether `grouped_products` takes these rows with these weights [e, k, n]."""
    return _is_supported(x, *weights.shape[1:]) and _is_product_verified(x.device, _product_tiles(x, weights))


def grouped_products(x: Tensor, weights: Tensor, bounds: Tensor) -> Tensor:
    """Twin of `grouped_mm` over rows. x [r, k] by weights [e, k, n] -> [r, n]"""
    return grouped_products_in_tiles(x, weights, bounds, _product_tiles(x, weights))


def grouped_products_in_tiles(x: Tensor, weights: Tensor, bounds: Tensor, shape: Tiles | None) -> Tensor:
    """Return the same in tiles of this shape."""
    quack = _load_gemm()
    if shape is None:
        # It tunes itself for each count of rows, which no two micro batches share.
        product: Tensor = quack.gemm(x, weights, cu_seqlens_m=bounds, tuned=False)
        return product
    product = x.new_empty(len(x), weights.shape[2])
    # Without its tuner `gemm` takes no tiles; this is what it calls.
    quack.gemm_tuned.fn(x, weights, product, C=None, cu_seqlens_m=bounds, config=_gemm_config(shape))
    return product


def can_add(gradient: Tensor, x: Tensor, total: Tensor) -> bool:
    """Return whether `add_outer_products` takes these."""
    return _is_supported(x, x.shape[1], gradient.shape[1]) and _is_addition_verified(x.device, total.dtype)


def add_outer_products(gradient: Tensor, x: Tensor, bounds: Tensor, total: Tensor) -> None:
    """total [e, n, k] += gradient [r, n] by x [r, k], of the rows of each expert."""
    _load_gemm().gemm_add_inplace(gradient.t(), x, total, cu_seqlens_k=bounds, tuned=False)


def can_write(gradient: Tensor, x: Tensor, target: Tensor) -> bool:
    """Return whether `write_outer_products` takes these."""
    return _is_supported(x, x.shape[1], gradient.shape[1]) and _is_writing_verified(x.device, target.dtype)


def write_outer_products(gradient: Tensor, x: Tensor, bounds: Tensor, target: Tensor) -> None:
    """into [e, n, k] = gradient [r, n] by x [r, k], of the rows of each expert; zeros for one without rows."""
    _load_gemm().gemm(gradient.t(), x, out=target, cu_seqlens_k=bounds, tuned=False)


def _product_tiles(x: Tensor, weights: Tensor) -> Tiles | None:
    """Return the tiles for these rows and weights [e, k, n]."""
    experts, *widths = weights.shape
    return choose_tiles(len(x) / experts, (widths[0], widths[1]), gpu_generation(x.device))


def _gemm_config(shape: Tiles) -> Any:
    # A plain count of tiles, as its default on Hopper.
    return load_module("gemm_config", OTHERWISE).GemmConfig(
        tile_m=shape.rows,
        tile_n=shape.columns,
        pingpong=shape.pingpong,
        cluster_m=shape.cluster_rows,
        cluster_n=shape.cluster_columns,
        is_dynamic_persistent=False,
    )


def _is_supported(x: Tensor, *widths: int) -> bool:
    is_aligned = all(width * x.element_size() % ALIGNMENT_BYTES == 0 for width in widths)
    return is_aligned and can_multiply_rows(x, x.dtype) and _load_gemm() is not None


@cache
def _is_product_verified(device: torch.device, shape: Tiles | None) -> bool:
    x, bounds, weights, _ = _make_trial(device)
    return is_accurate(grouped_products_in_tiles(x, weights, bounds, shape), exact_products(x, weights), OTHERWISE)


@cache
def _is_addition_verified(device: torch.device, dtype: torch.dtype) -> bool:
    if dtype not in WITHIN:
        return False
    x, bounds, weights, gradient = _make_trial(device)
    before = weights.transpose(1, 2).to(dtype).contiguous()
    total = before.clone()
    add_outer_products(gradient, x, bounds, total)
    return is_accurate(total, before.double() + _outer_products(gradient, x), OTHERWISE)


@cache
def _is_writing_verified(device: torch.device, dtype: torch.dtype) -> bool:
    if dtype not in WITHIN:
        return False
    x, bounds, weights, gradient = _make_trial(device)
    # Nothing of what lies there may be left.
    target = torch.full_like(weights.transpose(1, 2), torch.nan, dtype=dtype, memory_format=torch.contiguous_format)
    write_outer_products(gradient, x, bounds, target)
    return is_accurate(target, _outer_products(gradient, x), OTHERWISE)


def _outer_products(gradient: Tensor, x: Tensor) -> Tensor:
    """float64 [e, n, k], of the rows that were tried"""
    parts = zip(gradient.double().split(TRIED_ROWS), x.double().split(TRIED_ROWS), strict=True)
    return torch.stack([rows.t() @ part for rows, part in parts])


def _make_trial(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, their bounds, weights and a gradient."""
    rows = sum(TRIED_ROWS)
    shapes = ((rows, TRIED_INPUTS), (len(TRIED_ROWS), TRIED_INPUTS, TRIED_OUTPUTS), (rows, TRIED_OUTPUTS))
    x, weights, gradient = draw_numbers(device, *shapes)
    return x, trial_bounds(device), weights, gradient


def _load_gemm() -> Any:
    return load_module("gemm_interface", OTHERWISE)
