"""Gated activations with the rows' probabilities: one kernel forward, one backward, nothing kept but the input."""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def swiglu(gate_up: Tensor, probabilities: Tensor | None) -> Tensor:
    """Twin of `activation.plain_swiglu`."""
    activated: Tensor = _GatedActivation.apply(gate_up, probabilities, None, 0.0)
    return activated


def clamped_swiglu(gate_up: Tensor, probabilities: Tensor | None, limit: float, steepness: float) -> Tensor:
    """Twin of `activation.plain_clamped_swiglu`."""
    activated: Tensor = _GatedActivation.apply(gate_up, probabilities, limit, steepness)
    return activated


class _GatedActivation(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any, gate_up: Tensor, probabilities: Tensor | None, limit: float | None, steepness: float
    ) -> Tensor:
        gate_up = gate_up.contiguous()
        probabilities = None if probabilities is None else probabilities.contiguous()
        rows, _, width = gate_up.shape
        output = gate_up.new_empty(rows, width)
        context.save_for_backward(gate_up, probabilities)
        context.variant = (limit is not None, limit or 0.0, steepness)
        if rows:
            weighted = probabilities is not None
            _forward_kernel[(rows,)](
                gate_up, probabilities, output, width, weighted, *context.variant, BLOCK, num_warps=4
            )
        return output

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None, None, None]:
        gate_up, probabilities = context.saved_tensors
        rows, _, width = gate_up.shape
        slope = torch.empty_like(gate_up)
        weighted = probabilities is not None
        weights_slope = torch.empty_like(probabilities) if weighted else None
        if rows:
            tensors = (gate_up, probabilities, gradient.contiguous(), slope, weights_slope)
            _backward_kernel[(rows,)](*tensors, width, weighted, *context.variant, BLOCK, num_warps=4)
        return slope, weights_slope, None, None


@triton.jit
def _forward_kernel(
    gate_up,
    probabilities,
    output,
    width: tl.constexpr,
    weighted: tl.constexpr,
    clamped: tl.constexpr,
    limit: tl.constexpr,
    steepness: tl.constexpr,
    block: tl.constexpr,
):
    # Offsets are row * 2 * width, and may exceed 2^31.
    row = tl.program_id(0).to(tl.int64)
    probability = tl.load(probabilities + row).to(tl.float32) if weighted else 1.0
    for first in range(0, width, block):
        columns = first + tl.arange(0, block)
        inside = columns < width
        gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
        if clamped:
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
            activated = (up + 1.0) * gate * tl.sigmoid(gate * steepness)
        else:
            activated = gate * tl.sigmoid(gate) * up
        value = activated * probability
        tl.store(output + row * width + columns, value.to(output.dtype.element_ty), mask=inside)


@triton.jit
def _backward_kernel(
    gate_up,
    probabilities,
    gradient,
    slope,
    weights_slope,
    width: tl.constexpr,
    weighted: tl.constexpr,
    clamped: tl.constexpr,
    limit: tl.constexpr,
    steepness: tl.constexpr,
    block: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    probability = tl.load(probabilities + row).to(tl.float32) if weighted else 1.0
    share = tl.zeros((block,), tl.float32)
    for first in range(0, width, block):
        columns = first + tl.arange(0, block)
        inside = columns < width
        gate = tl.load(gate_up + row * 2 * width + columns, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(gate_up + row * 2 * width + width + columns, mask=inside, other=0.0).to(tl.float32)
        upstream = tl.load(gradient + row * width + columns, mask=inside, other=0.0).to(tl.float32)
        if clamped:
            # Beyond a bound a clamped number no longer depends on its input: slope 0.
            gate_passes = gate <= limit
            up_passes = (up >= -limit) & (up <= limit)
            gate = tl.minimum(gate, limit)
            up = tl.minimum(tl.maximum(up, -limit), limit)
            gated = tl.sigmoid(gate * steepness)
            factor = up + 1.0
            gate_slope = tl.where(gate_passes, factor * gated * (1.0 + gate * steepness * (1.0 - gated)), 0.0)
            up_slope = tl.where(up_passes, gate * gated, 0.0)
        else:
            gated = tl.sigmoid(gate)
            factor = up
            # With s = sigmoid(g): d/dg of g s is s + g s (1 - s) = s (1 + g (1 - s)).
            gate_slope = factor * gated * (1.0 + gate * (1.0 - gated))
            up_slope = gate * gated
        # The slope of a probability: the sum over its row of upstream x activated.
        share += upstream * gate * gated * factor
        upstream = upstream * probability
        place = slope + row * 2 * width + columns
        tl.store(place, (upstream * gate_slope).to(slope.dtype.element_ty), mask=inside)
        tl.store(place + width, (upstream * up_slope).to(slope.dtype.element_ty), mask=inside)
    if weighted:
        tl.store(weights_slope + row, tl.sum(share, 0).to(weights_slope.dtype.element_ty))
