"""The precision that a layer computes in, whatever its tensors are stored in.

Products of bfloat16 are summed in float32 and rounded once, as GPUs do it. Where a CPU has no instructions for them,
torch multiplies one number at a time: by weights that are not transposed, thirty times slower than in float32. Widened
numbers give the same sums.
"""

from __future__ import annotations

import torch
from torch import Tensor


def at_least_float32(x: Tensor) -> Tensor:
    """`x` in float32, or as it is where that would lose digits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def needs_widening(device_type: str, dtype: torch.dtype, *, has_bfloat16_products: bool) -> bool:
    """Return whether such numbers are widened to float32 before they are multiplied."""
    return device_type == "cpu" and dtype is torch.bfloat16 and not has_bfloat16_products


def needs_float32_products(x: Tensor) -> bool:
    """Return whether this machine widens `x` to float32 before it is multiplied."""
    return needs_widening(x.device.type, x.dtype, has_bfloat16_products=_HAS_BFLOAT16_PRODUCTS)


def matrix_product(x: Tensor, y: Tensor) -> Tensor:
    """x @ y in the type of x, summed in float32."""
    if needs_float32_products(x):
        return (at_least_float32(x) @ at_least_float32(y)).to(x.dtype)
    return x @ y


# oneDNN's own answer, which torch asks before each product.
_HAS_BFLOAT16_PRODUCTS = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # noqa: SLF001
