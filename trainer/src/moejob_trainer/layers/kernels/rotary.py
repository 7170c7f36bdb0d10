"""Heads turned in one pass each way, wherever they lie in a larger projection."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor


def rotate_heads(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """Twin of `rotary.plain_rotate_heads`."""
    rotated_heads: Tensor = _RotateHeads.apply(x, cos, sin, interleaved)
    return rotated_heads


class _RotateHeads(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
        cos, sin = cos.contiguous(), sin.contiguous()
        context.save_for_backward(cos, sin)
        context.interleaved = interleaved
        return _launch_rotation(x, cos, sin, interleaved, backward=False)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        cos, sin = context.saved_tensors
        return _launch_rotation(gradient, cos, sin, context.interleaved, backward=True), None, None, None


def _launch_rotation(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, *, backward: bool) -> Tensor:
    x = x if x.stride(-1) == 1 else x.contiguous()
    tokens, heads, dim = x.shape
    output = x.new_empty(tokens, heads, dim)
    half = cos.shape[1]
    if output.numel():
        shape = (heads, dim, half, triton.next_power_of_2(heads), triton.next_power_of_2(half))
        tail = triton.next_power_of_2(max(dim - 2 * half, 1))
        _rotation_kernel[(tokens,)](
            x, cos, sin, output, x.stride(0), x.stride(1), *shape, tail, interleaved, backward, num_warps=4
        )
    return output


@triton.jit
def _rotation_kernel(
    x,
    cos,
    sin,
    output,
    token_stride,
    head_stride,
    heads: tl.constexpr,
    dim: tl.constexpr,
    half: tl.constexpr,
    tile_heads: tl.constexpr,
    tile_half: tl.constexpr,
    tile_tail: tl.constexpr,
    interleaved: tl.constexpr,
    backward: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    head = tl.arange(0, tile_heads)
    pair = tl.arange(0, tile_half)
    inside = (head < heads)[:, None] & (pair < half)[None, :]
    c = tl.load(cos + token * half + pair, mask=pair < half, other=0.0)[None, :]
    s = tl.load(sin + token * half + pair, mask=pair < half, other=0.0)[None, :]
    # Interleaved pairs come out as halves, and their gradients go back as pairs.
    pairs_in: tl.constexpr = interleaved and not backward
    pairs_out: tl.constexpr = interleaved and backward
    if backward:
        s = -s
    source = x + token * token_stride + (head * head_stride)[:, None]
    target = output + token * heads * dim + (head * dim)[:, None]
    if pairs_in:
        first_in, second_in = 2 * pair, 2 * pair + 1
    else:
        first_in, second_in = pair, pair + half
    if pairs_out:
        first_out, second_out = 2 * pair, 2 * pair + 1
    else:
        first_out, second_out = pair, pair + half
    first = tl.load(source + first_in[None, :], mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + second_in[None, :], mask=inside, other=0.0).to(tl.float32)
    tl.store(target + first_out[None, :], (first * c - second * s).to(output.dtype.element_ty), mask=inside)
    tl.store(target + second_out[None, :], (second * c + first * s).to(output.dtype.element_ty), mask=inside)
    if dim > 2 * half:
        tail_columns = 2 * half + tl.arange(0, tile_tail)
        has_tail = (head < heads)[:, None] & (tail_columns < dim)[None, :]
        tl.store(target + tail_columns[None, :], tl.load(source + tail_columns[None, :], mask=has_tail), mask=has_tail)
