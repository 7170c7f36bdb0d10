"""A step of AdamW in one pass: gradients are scaled and widened, and weights rounded, on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

# As fast as a copy (H200), where the compiler may know that elements come in sixteens: masked loads stay wide then.
BLOCK, WARPS = 1024, 4


@dataclass(frozen=True, slots=True)
class AdamWStep:
    """The numbers of one step; `step` counts from 1, decay is decoupled."""

    step: int
    learning_rate: float
    gradient_scale: float
    beta1: float
    beta2: float
    epsilon: float
    weight_decay: float


def can_update(*tensors: Tensor) -> bool:
    """Return whether all lie in one piece on one GPU."""
    return all(tensor.is_contiguous() and tensor.device == tensors[0].device for tensor in tensors)


def update_weights(
    weight: Tensor, gradient: Tensor, master_storage: Tensor, first: Tensor, second: Tensor, numbers: AdamWStep
) -> None:
    """Move weights and moments one step on. Twin of torch's fused adamw; the gradient stays as it is.

    `master_storage` is the same tensor as `weight`, in float32, or what a `weight` in bfloat16 lacks of its master,
    in int16.
    """
    elements = weight.numel()
    if not elements:
        return
    _update_kernel[(triton.cdiv(elements, BLOCK),)](
        weight,
        gradient,
        master_storage,
        first,
        second,
        elements,
        numbers.gradient_scale,
        1 - numbers.learning_rate * numbers.weight_decay,
        numbers.learning_rate / (1 - numbers.beta1**numbers.step),
        numbers.beta1,
        numbers.beta2,
        1 / math.sqrt(1 - numbers.beta2**numbers.step),
        numbers.epsilon,
        master_storage.dtype is torch.int16,
        BLOCK,
        num_warps=WARPS,
    )


@triton.jit
def _update_kernel(
    weight,
    gradient,
    master_storage,
    first,
    second,
    elements,
    scale,
    decay,
    rate,
    beta1,
    beta2,
    correction,
    epsilon,
    is_split: tl.constexpr,
    block: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    is_here = place < elements
    slope = tl.load(gradient + place, mask=is_here, other=0.0).to(tl.float32) * scale
    if is_split:
        upper = tl.load(weight + place, mask=is_here, other=0.0).to(tl.int16, bitcast=True).to(tl.int32) << 16
        value = (upper + tl.load(master_storage + place, mask=is_here, other=0).to(tl.int32)).to(
            tl.float32, bitcast=True
        )
    else:
        value = tl.load(weight + place, mask=is_here, other=0.0)
    value *= decay
    mean = tl.load(first + place, mask=is_here, other=0.0).to(tl.float32)
    square = tl.load(second + place, mask=is_here, other=0.0).to(tl.float32)
    mean = beta1 * mean + (1 - beta1) * slope
    square = beta2 * square + (1 - beta2) * slope * slope
    value -= rate * mean / (tl.sqrt(square) * correction + epsilon)
    tl.store(first + place, mean.to(first.dtype.element_ty), mask=is_here)
    tl.store(second + place, square.to(second.dtype.element_ty), mask=is_here)
    if is_split:
        # As megatron/master_weights.py splits them.
        bits = value.to(tl.int32, bitcast=True)
        bits = tl.where((bits & 0x7FFFFFFF) <= 0x7F800000, bits, 0x7FC00000)
        upper = (bits + 0x8000) >> 16
        tl.store(weight + place, upper.to(tl.int16).to(tl.bfloat16, bitcast=True), mask=is_here)
        tl.store(master_storage + place, (bits - (upper << 16)).to(tl.int16), mask=is_here)
    else:
        tl.store(weight + place, value, mask=is_here)
