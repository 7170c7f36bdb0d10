"""The sum of each token's rows, read where they lie. Adding rows to tokens one by one is sixteen times slower."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


def row_sums(rows: Tensor, inverse: Tensor, into: Tensor | None = None) -> Tensor:
    """Twin of `permutation.plain_row_sums`; the sums are written into contiguous memory where some is given."""
    rows, inverse = rows.contiguous(), inverse.contiguous()
    (tokens, choices), width = inverse.shape, rows.shape[1]
    sums = rows.new_empty(tokens, width) if into is None else into
    block = min(BLOCK, triton.next_power_of_2(width))
    if sums.numel():
        _row_sums[(tokens, triton.cdiv(width, block))](
            rows, inverse, sums, rows.shape[0], width, choices, block, num_warps=8
        )
    return sums


@triton.jit(do_not_specialize=["row_count"])
def _row_sums(rows, inverse, sums, row_count, width: tl.constexpr, choices: tl.constexpr, block: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * block + tl.arange(0, block)
    inside = columns < width
    total = tl.zeros((block,), tl.float32)
    for choice in tl.static_range(choices):
        # A choice of none points behind the last row.
        row = tl.load(inverse + token * choices + choice).to(tl.int64)
        total += tl.load(rows + row * width + columns, mask=inside & (row < row_count), other=0.0).to(tl.float32)
    tl.store(sums + token * width + columns, total.to(sums.dtype.element_ty), mask=inside)
