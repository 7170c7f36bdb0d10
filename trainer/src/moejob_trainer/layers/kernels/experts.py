"""Products of many experts by quack-kernels, which also add weight gradients to their sum inside the product."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor

from moejob_trainer.layers.kernels.quack import (
    TRIED_ROWS,
    WITHIN,
    Tiles,
    agrees,
    drawn,
    exact_products,
    generation,
    module,
    takes,
    tried_bounds,
)

OTHERWISE = "products of experts are torch's"
# What the copy engine of a GPU moves begins and ends at multiples of it.
ALIGNMENT_BYTES = 16
TRIED_INPUTS, TRIED_OUTPUTS = 264, 392
# Between what widths of both sides of a weight, and from how many rows for each expert, tiles of our own are faster.
WIDE, WIDEST, MANY_ROWS = 4096, 16384, 2048
# The generation that they were measured on.
HOPPER = 9
# benchmarks/training-gpu.md has what was measured.
WIDE_TILES = Tiles(192, 128, pingpong=True, cluster_rows=1, cluster_columns=2)


def tiles(rows_per_expert: float, widths: tuple[int, int], of_generation: int) -> Tiles | None:
    """Return the tiles of products with weights of these widths; None for those that quack-kernels takes itself."""
    is_wide = min(widths) >= WIDE and max(widths) <= WIDEST
    return WIDE_TILES if of_generation == HOPPER and rows_per_expert >= MANY_ROWS and is_wide else None


def multiplies(x: Tensor, weights: Tensor) -> bool:
    """Return whether `products` takes these rows with these weights [e, k, n]."""
    return _supports(x, *weights.shape[1:]) and _multiplies_rightly(x.device, _tiles(x, weights))


def products(x: Tensor, weights: Tensor, bounds: Tensor) -> Tensor:
    """Twin of `grouped_mm` over rows. x [r, k] by weights [e, k, n] -> [r, n]"""
    return products_in_tiles(x, weights, bounds, _tiles(x, weights))


def products_in_tiles(x: Tensor, weights: Tensor, bounds: Tensor, shape: Tiles | None) -> Tensor:
    """Return the same in tiles of this shape."""
    quack = _quack()
    if shape is None:
        # It tunes itself for each count of rows, which no two micro batches share.
        product: Tensor = quack.gemm(x, weights, cu_seqlens_m=bounds, tuned=False)
        return product
    product = x.new_empty(len(x), weights.shape[2])
    # Without its tuner `gemm` takes no tiles; this is what it calls.
    quack.gemm_tuned.fn(x, weights, product, C=None, cu_seqlens_m=bounds, config=_config(shape))
    return product


def adds(gradient: Tensor, x: Tensor, total: Tensor) -> bool:
    """Return whether `add_outer_products` takes these."""
    return _supports(x, x.shape[1], gradient.shape[1]) and _adds_rightly(x.device, total.dtype)


def add_outer_products(gradient: Tensor, x: Tensor, bounds: Tensor, total: Tensor) -> None:
    """total [e, n, k] += gradient [r, n] by x [r, k], of the rows of each expert."""
    _quack().gemm_add_inplace(gradient.t(), x, total, cu_seqlens_k=bounds, tuned=False)


def writes(gradient: Tensor, x: Tensor, into: Tensor) -> bool:
    """Return whether `write_outer_products` takes these."""
    return _supports(x, x.shape[1], gradient.shape[1]) and _writes_rightly(x.device, into.dtype)


def write_outer_products(gradient: Tensor, x: Tensor, bounds: Tensor, into: Tensor) -> None:
    """into [e, n, k] = gradient [r, n] by x [r, k], of the rows of each expert; zeros for one without rows."""
    _quack().gemm(gradient.t(), x, out=into, cu_seqlens_k=bounds, tuned=False)


def _tiles(x: Tensor, weights: Tensor) -> Tiles | None:
    """Return the tiles for these rows and weights [e, k, n]."""
    experts, *widths = weights.shape
    return tiles(len(x) / experts, (widths[0], widths[1]), generation(x.device))


def _config(shape: Tiles) -> Any:
    # A plain count of tiles, as its default on Hopper.
    return module("gemm_config", OTHERWISE).GemmConfig(
        tile_m=shape.rows,
        tile_n=shape.columns,
        pingpong=shape.pingpong,
        cluster_m=shape.cluster_rows,
        cluster_n=shape.cluster_columns,
        is_dynamic_persistent=False,
    )


def _supports(x: Tensor, *widths: int) -> bool:
    is_aligned = all(width * x.element_size() % ALIGNMENT_BYTES == 0 for width in widths)
    return is_aligned and takes(x, x.dtype) and _quack() is not None


@cache
def _multiplies_rightly(device: torch.device, shape: Tiles | None) -> bool:
    x, bounds, weights, _ = _tried(device)
    return agrees(products_in_tiles(x, weights, bounds, shape), exact_products(x, weights), OTHERWISE)


@cache
def _adds_rightly(device: torch.device, dtype: torch.dtype) -> bool:
    if dtype not in WITHIN:
        return False
    x, bounds, weights, gradient = _tried(device)
    before = weights.transpose(1, 2).to(dtype).contiguous()
    total = before.clone()
    add_outer_products(gradient, x, bounds, total)
    return agrees(total, before.double() + _outer_products(gradient, x), OTHERWISE)


@cache
def _writes_rightly(device: torch.device, dtype: torch.dtype) -> bool:
    if dtype not in WITHIN:
        return False
    x, bounds, weights, gradient = _tried(device)
    # Nothing of what lies there may be left.
    into = torch.full_like(weights.transpose(1, 2), torch.nan, dtype=dtype, memory_format=torch.contiguous_format)
    write_outer_products(gradient, x, bounds, into)
    return agrees(into, _outer_products(gradient, x), OTHERWISE)


def _outer_products(gradient: Tensor, x: Tensor) -> Tensor:
    """float64 [e, n, k], of the rows that were tried"""
    parts = zip(gradient.double().split(TRIED_ROWS), x.double().split(TRIED_ROWS), strict=True)
    return torch.stack([rows.t() @ part for rows, part in parts])


def _tried(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, their bounds, weights and a gradient."""
    rows = sum(TRIED_ROWS)
    shapes = ((rows, TRIED_INPUTS), (len(TRIED_ROWS), TRIED_INPUTS, TRIED_OUTPUTS), (rows, TRIED_OUTPUTS))
    x, weights, gradient = drawn(device, *shapes)
    return x, tried_bounds(device), weights, gradient


def _quack() -> Any:
    return module("gemm_interface", OTHERWISE)
