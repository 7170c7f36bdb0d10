"""A step of AdamW in one pass: gradients are scaled and widened, and weights rounded, on the way."""

from __future__ import annotations

import math
from dataclasses import dataclass

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 2048


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


def takes(*tensors: Tensor) -> bool:
    """Return whether all lie in one piece on one GPU."""
    return all(tensor.is_contiguous() and tensor.device == tensors[0].device for tensor in tensors)


def update(weight: Tensor, gradient: Tensor, main: Tensor, first: Tensor, second: Tensor, numbers: AdamWStep) -> None:
    """Move `main` and the moments one step on, and round `main` into `weight`, which may be the same tensor.

    Twin of torch's fused adamw. The gradient stays as it is.
    """
    elements = main.numel()
    if not elements:
        return
    _step[(triton.cdiv(elements, BLOCK),)](
        weight,
        gradient,
        main,
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
        main.dtype is not weight.dtype,
        BLOCK,
        num_warps=8,
    )


@triton.jit(do_not_specialize=["elements"])
def _step(
    weight,
    gradient,
    main,
    first,
    second,
    elements,
    scale,
    kept,
    rate,
    beta1,
    beta2,
    correction,
    epsilon,
    is_rounded: tl.constexpr,
    block: tl.constexpr,
):
    place = tl.program_id(0).to(tl.int64) * block + tl.arange(0, block)
    is_here = place < elements
    slope = tl.load(gradient + place, mask=is_here, other=0.0).to(tl.float32) * scale
    value = tl.load(main + place, mask=is_here, other=0.0) * kept
    mean = tl.load(first + place, mask=is_here, other=0.0).to(tl.float32)
    square = tl.load(second + place, mask=is_here, other=0.0).to(tl.float32)
    mean = beta1 * mean + (1 - beta1) * slope
    square = beta2 * square + (1 - beta2) * slope * slope
    value -= rate * mean / (tl.sqrt(square) * correction + epsilon)
    tl.store(main + place, value, mask=is_here)
    tl.store(first + place, mean.to(first.dtype.element_ty), mask=is_here)
    tl.store(second + place, square.to(second.dtype.element_ty), mask=is_here)
    if is_rounded:
        tl.store(weight + place, value.to(weight.dtype.element_ty), mask=is_here)
