"""Products of numbers that are rounded to FP8: four bits of exponent, three of mantissa, and a scale for each row.

A scale is a power of two, so scaling loses no bit: rounded numbers are exact in bfloat16, and their products are summed
in float32. A product sums over a row of each side, so a weight is rounded along its inputs for the forward pass, and
along its outputs for the gradient of the input:

    y = x W^T        rows of x, and rows of W          [t, k] by [n, k]
    dx = dy W        rows of dy, and rows of W^T       [t, n] by [k, n]
    dW = dy^T x      sums over tokens: of numbers that were not rounded

A row whose largest number is 3 is multiplied by 128, the power of two below 448 / 3 = 149.3: 3 becomes 384, and the
stored scale is 1 / 128.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from moejob_trainer.layers.kernels import kernels

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
# The least largest number of a row: for a row of zeros the scale would be infinite.
SMALLEST = 1e-30
EXPONENT_BITS = 0x7F800000
# Widths of both sides have to be multiples of it, for the copy engine of a GPU.
WIDTH_MULTIPLE = 16


@dataclass(frozen=True, slots=True, eq=False)
class Rounded:
    """Rows of FP8 numbers [.., r, k], and the float32 scale of each row [.., r]."""

    values: Tensor
    scales: Tensor

    def plain(self, dtype: torch.dtype) -> Tensor:
        """The numbers that these are, exact in bfloat16 and wider types. [.., r, k]"""
        return (self.values.float() * self.scales.unsqueeze(-1)).to(dtype)


class Float8Weight:
    """The two roundings of one weight. A product makes them; with `keeps` they serve until the weight changes."""

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._by_inputs: Rounded | None = None
        self._by_outputs: Rounded | None = None

    def by_inputs(self, weight: Tensor) -> Rounded:
        """Rows of inputs, one for each output. weight [.., n, k] -> [.., n, k]"""
        found = rounded_rows(weight) if self._by_inputs is None else self._by_inputs
        self._by_inputs = found if self._keeps else None
        return found

    def by_outputs(self, weight: Tensor) -> Rounded:
        """Rows of outputs, one for each input. weight [.., n, k] -> [.., k, n]"""
        found = rounded_columns(weight) if self._by_outputs is None else self._by_outputs
        self._by_outputs = found if self._keeps else None
        return found

    def forget(self) -> None:
        """Drop both roundings, before the weight changes."""
        self._by_inputs = self._by_outputs = None


def rounded_rows(x: Tensor) -> Rounded:
    """Round each row [.., r, k] with a scale that lets its largest number just fit."""
    fused = kernels("float8", x)
    values, scales = (fused.rounded_rows if fused else plain_rounded_rows)(x.contiguous())
    return Rounded(values, scales)


def rounded_columns(x: Tensor) -> Rounded:
    """Round each column, and return columns as rows. [.., r, k] -> [.., k, r]"""
    fused = kernels("float8", x)
    values, scales = (fused.rounded_columns if fused else plain_rounded_columns)(x.contiguous())
    return Rounded(values, scales)


def plain_rounded_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`rounded_rows` in the operations of torch."""
    wide = x.float()
    largest = wide.abs().amax(-1).clamp(min=SMALLEST)
    upwards = ((LARGEST / largest).view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    return (wide * upwards.unsqueeze(-1)).to(FLOAT8), upwards.reciprocal()


def plain_rounded_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """`rounded_columns` in the operations of torch."""
    return plain_rounded_rows(x.transpose(-2, -1).contiguous())


def product(x: Rounded, weight: Rounded, dtype: torch.dtype) -> Tensor:
    """Rows x [t, k] times each row of a weight [n, k]. [t, n]"""
    fused = kernels("float8", x.values)
    if fused and fused.multiplies(x.values, dtype):
        found: Tensor = fused.product(x.values, x.scales, weight.values, weight.scales)
        return found
    return functional.linear(x.plain(dtype), weight.plain(dtype))
