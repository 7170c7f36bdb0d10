"""Common parts of products by quack-kernels: where they run, in which tiles, and the small case each is tried on.

Its kernels are compiled for the GPU at hand, by a compiler that is as young as they are. No product is used for
training before its result for a small case has been compared with float64 on that GPU.
"""

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
# The rows of each expert in a small case: none, one, and more than tiles divide evenly.
TRIED_ROWS = (0, 5, 700, 0, 129, 1, 64, 0)
# Of the largest element.
WITHIN = {torch.bfloat16: 1e-2, torch.float32: 1e-4}


@dataclass(frozen=True, slots=True)
class Tiles:
    """The part of a product that a block of threads makes at a time, and the blocks that share what they load."""

    rows: int
    columns: int
    # Two groups of warps make a tile each by turns, instead of one together.
    pingpong: bool
    cluster_rows: int
    cluster_columns: int


def gpu_generation(device: torch.device) -> int:
    """9 for Hopper, 10 and 11 for Blackwell."""
    return torch.cuda.get_device_capability(device)[0]


def can_multiply_rows(x: Tensor, dtype: torch.dtype) -> bool:
    """Return whether rows like these are multiplied by quack-kernels here, where products are of this type."""
    # Its products have not been seen to give the same bits twice.
    if dtype is not torch.bfloat16 or not len(x) or torch.are_deterministic_algorithms_enabled():
        return False
    return gpu_generation(x.device) in GENERATIONS


@cache
def load_module(name: str, otherwise: str) -> Any:
    """A module of quack-kernels; None without one that works here. otherwise: what is so then, for a warning."""
    if find_spec("quack") is None:
        return None
    try:
        return import_module(f"quack.{name}")
    except ImportError as error:
        # Beside other versions of what it is built on.
        warnings.warn(f"quack-kernels is installed but not usable, so {otherwise}: {error}", stacklevel=2)
        return None


def draw_numbers(device: torch.device, *shapes: tuple[int, ...]) -> list[Tensor]:
    """Numbers of a small case, drawn beside the job's own random ones. bfloat16"""
    random = torch.Generator(device).manual_seed(1)
    return [torch.randn(shape, generator=random, device=device, dtype=torch.bfloat16) for shape in shapes]


def trial_bounds(device: torch.device) -> Tensor:
    """Bounds of the rows of each expert of a small case. int32"""
    return torch.tensor([*accumulate(TRIED_ROWS, initial=0)], device=device, dtype=torch.int32)


def exact_products(rows: Tensor, weights: Tensor) -> Tensor:
    """The rows of a small case [r, k], each times its expert's weight [e, k, n]. float64 [r, n]"""
    parts = zip(rows.double().split(TRIED_ROWS), weights.double(), strict=True)
    return torch.cat([part @ weight for part, weight in parts])


def is_accurate(result: Tensor, exact: Tensor, otherwise: str) -> bool:
    """Return whether a result is near the exact one; warn if not. otherwise: what is so then."""
    error = ((result.double() - exact).abs().max() / exact.abs().max()).item()
    # Nothing is less than `not a number`.
    if error <= WITHIN[result.dtype]:
        return True
    warnings.warn(f"quack-kernels is off by {error:.1e} on {result.device}, so {otherwise}", stacklevel=2)
    return False
