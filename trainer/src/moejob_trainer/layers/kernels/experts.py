"""Products of many experts by quack-kernels, which also add weight gradients to their sum inside the product."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

# Hopper and Blackwell.
GENERATIONS = (9, 10, 11)
# What their copy engine moves begins and ends at multiples of it.
ALIGNMENT_BYTES = 16
# A small case, before anything is trained: experts without rows, with one, and with more than tiles divide evenly.
TRIED_ROWS, TRIED_INPUTS, TRIED_OUTPUTS = (0, 5, 700, 0, 129, 1, 64, 0), 264, 392
WITHIN = {torch.bfloat16: 1e-2, torch.float32: 1e-4}
# Between what widths of both sides of a weight, and from how many rows for each expert, tiles of our own are faster.
WIDE, WIDEST, MANY_ROWS = 4096, 16384, 2048
# The generation that they were measured on.
HOPPER = 9


@dataclass(frozen=True, slots=True)
class Tiles:
    """The part of a product that a block of threads makes at a time, and the blocks that share what they load."""

    rows: int
    columns: int
    # Two groups of warps make a tile each by turns, instead of one together.
    pingpong: bool
    cluster_rows: int
    cluster_columns: int


# benchmarks/training-gpu.md has what was measured.
WIDE_TILES = Tiles(192, 128, pingpong=True, cluster_rows=1, cluster_columns=2)


def tiles(rows_per_expert: float, widths: tuple[int, int], generation: int) -> Tiles | None:
    """Return the tiles of products with weights of these widths; None for those that quack-kernels takes itself."""
    is_wide = min(widths) >= WIDE and max(widths) <= WIDEST
    return WIDE_TILES if generation == HOPPER and rows_per_expert >= MANY_ROWS and is_wide else None


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
    generation = torch.cuda.get_device_capability(x.device)[0]
    return tiles(len(x) / experts, (widths[0], widths[1]), generation)


def _config(shape: Tiles) -> Any:
    # A plain count of tiles, as its default on Hopper.
    return import_module("quack.gemm_config").GemmConfig(
        tile_m=shape.rows,
        tile_n=shape.columns,
        pingpong=shape.pingpong,
        cluster_m=shape.cluster_rows,
        cluster_n=shape.cluster_columns,
        is_dynamic_persistent=False,
    )


def _supports(x: Tensor, *widths: int) -> bool:
    # It has not been seen to give the same bits twice.
    if x.dtype is not torch.bfloat16 or not len(x) or torch.are_deterministic_algorithms_enabled():
        return False
    return (
        all(width * x.element_size() % ALIGNMENT_BYTES == 0 for width in widths)
        and torch.cuda.get_device_capability(x.device)[0] in GENERATIONS
        and _quack() is not None
    )


@cache
def _multiplies_rightly(device: torch.device, shape: Tiles | None) -> bool:
    x, bounds, weights, _ = _tried(device)
    parts = zip(x.double().split(TRIED_ROWS), weights.double(), strict=True)
    return _agrees(products_in_tiles(x, weights, bounds, shape), torch.cat([part @ weight for part, weight in parts]))


@cache
def _adds_rightly(device: torch.device, dtype: torch.dtype) -> bool:
    if dtype not in WITHIN:
        return False
    x, bounds, weights, gradient = _tried(device)
    before = weights.transpose(1, 2).to(dtype).contiguous()
    total = before.clone()
    add_outer_products(gradient, x, bounds, total)
    return _agrees(total, before.double() + _outer_products(gradient, x))


@cache
def _writes_rightly(device: torch.device, dtype: torch.dtype) -> bool:
    if dtype not in WITHIN:
        return False
    x, bounds, weights, gradient = _tried(device)
    # Nothing of what lies there may be left.
    into = torch.full_like(weights.transpose(1, 2), torch.nan, dtype=dtype, memory_format=torch.contiguous_format)
    write_outer_products(gradient, x, bounds, into)
    return _agrees(into, _outer_products(gradient, x))


def _outer_products(gradient: Tensor, x: Tensor) -> Tensor:
    """float64 [e, n, k], of the rows that were tried"""
    parts = zip(gradient.double().split(TRIED_ROWS), x.double().split(TRIED_ROWS), strict=True)
    return torch.stack([rows.t() @ part for rows, part in parts])


def _tried(device: torch.device) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, their bounds, weights and a gradient, drawn beside the job's own random numbers."""
    random = torch.Generator(device).manual_seed(1)
    rows = sum(TRIED_ROWS)
    shapes = ((rows, TRIED_INPUTS), (len(TRIED_ROWS), TRIED_INPUTS, TRIED_OUTPUTS), (rows, TRIED_OUTPUTS))
    x, weights, gradient = (
        torch.randn(shape, generator=random, device=device, dtype=torch.bfloat16) for shape in shapes
    )
    bounds = torch.tensor([*accumulate(TRIED_ROWS, initial=0)], device=device, dtype=torch.int32)
    return x, bounds, weights, gradient


def _agrees(found: Tensor, exact: Tensor) -> bool:
    off = ((found.double() - exact).abs().max() / exact.abs().max()).item()
    # Nothing is less than `not a number`.
    if off <= WITHIN[found.dtype]:
        return True
    warnings.warn(
        f"quack-kernels is off by {off:.1e} on {found.device}, so products of experts are torch's", stacklevel=2
    )
    return False


@cache
def _quack() -> Any:
    if find_spec("quack") is None:
        return None
    try:
        return import_module("quack.gemm_interface")
    except ImportError as error:
        # Beside other versions of what it is built on.
        warnings.warn(
            f"quack-kernels is installed but not usable, so products of experts are torch's: {error}", stacklevel=2
        )
        return None
