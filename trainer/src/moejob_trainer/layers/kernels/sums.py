"""Sums of several tensors in one pass over memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# As for a step of AdamW: what bounds it is memory.
BLOCK, WARPS = 2048, 8


def add_both(total: Tensor, first: Tensor, second: Tensor) -> None:
    """Add two tensors to a total, in float32 and rounded once. Twin of `total.add_(first + second)`; all are flat."""
    elements = total.numel()
    if elements:
        _add_both_kernel[(triton.cdiv(elements, BLOCK),)](total, first, second, elements, BLOCK, num_warps=WARPS)


@triton.jit
def _add_both_kernel(total, first, second, elements, block: tl.constexpr):
    # A matrix of experts may have more than 2^31 elements.
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    exists = place < elements
    result = tl.load(first + place, exists).to(tl.float32) + tl.load(second + place, exists).to(tl.float32)
    result += tl.load(total + place, exists).to(tl.float32)
    tl.store(total + place, result.to(total.dtype.element_ty), exists)
