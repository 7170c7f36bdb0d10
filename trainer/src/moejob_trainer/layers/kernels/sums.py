"""Sums of several tensors in one pass over memory."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

# As for a step of AdamW: what bounds it is memory.
BLOCK, WARPS = 2048, 8


def add_both(total: Tensor, one: Tensor, other: Tensor) -> None:
    """Add two to a total, in float32 and rounded once. Twin of `total.add_(one + other)`; all are flat."""
    elements = total.numel()
    if elements:
        _add_both[(triton.cdiv(elements, BLOCK),)](total, one, other, elements, BLOCK, num_warps=WARPS)


@triton.jit
def _add_both(total, one, other, elements, block: tl.constexpr):
    # A matrix of experts may have more than 2^31 elements.
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    exists = place < elements
    found = tl.load(one + place, exists).to(tl.float32) + tl.load(other + place, exists).to(tl.float32)
    found += tl.load(total + place, exists).to(tl.float32)
    tl.store(total + place, found.to(total.dtype.element_ty), exists)
