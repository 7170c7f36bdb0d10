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

from moejob_trainer.layers.kernels import find_kernels

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
# The least largest number of a row: for a row of zeros the scale would be infinite.
SMALLEST = 1e-30
EXPONENT_BITS = 0x7F800000
# Widths of both sides have to be multiples of it, for the copy engine of a GPU.
WIDTH_MULTIPLE = 16


@dataclass(frozen=True, slots=True, eq=False)
class QuantizedRows:
    """Rows of FP8 numbers [.., r, k], and the float32 scale of each row [.., r]."""

    values: Tensor
    scales: Tensor

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The numbers that these are, exact in bfloat16 and wider types. [.., r, k]"""
        return (self.values.float() * self.scales.unsqueeze(-1)).to(dtype)


class Float8Weight:
    """The two roundings of one weight. A product makes them; with `keeps` they serve until the weight changes."""

    def __init__(self, *, keeps: bool) -> None:
        self._keeps = keeps
        self._by_inputs: QuantizedRows | None = None
        self._by_outputs: QuantizedRows | None = None

    def quantize_by_inputs(self, weight: Tensor) -> QuantizedRows:
        """Rows of inputs, one for each output. weight [.., n, k] -> [.., n, k]"""
        quantized = quantize_rows(weight) if self._by_inputs is None else self._by_inputs
        self._by_inputs = quantized if self._keeps else None
        return quantized

    def quantize_by_outputs(self, weight: Tensor) -> QuantizedRows:
        """Rows of outputs, one for each input. weight [.., n, k] -> [.., k, n]"""
        quantized = quantize_columns(weight) if self._by_outputs is None else self._by_outputs
        self._by_outputs = quantized if self._keeps else None
        return quantized

    def discard_roundings(self) -> None:
        """Drop both roundings, before the weight changes."""
        self._by_inputs = self._by_outputs = None


def quantize_rows(x: Tensor) -> QuantizedRows:
    """Round each row [.., r, k] with a scale that lets its largest number just fit."""
    fused = find_kernels("float8", x)
    values, scales = (fused.quantize_rows if fused else plain_quantize_rows)(x.contiguous())
    return QuantizedRows(values, scales)


def quantize_columns(x: Tensor) -> QuantizedRows:
    """Round each column, and return columns as rows. [.., r, k] -> [.., k, r]"""
    fused = find_kernels("float8", x)
    values, scales = (fused.quantize_columns if fused else plain_quantize_columns)(x.contiguous())
    return QuantizedRows(values, scales)


def plain_quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_rows` in the operations of torch."""
    wide = x.float()
    largest = wide.abs().amax(-1).clamp(min=SMALLEST)
    upwards = ((LARGEST / largest).view(torch.int32) & EXPONENT_BITS).view(torch.float32)
    return (wide * upwards.unsqueeze(-1)).to(FLOAT8), upwards.reciprocal()


def plain_quantize_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    """`quantize_columns` in the operations of torch."""
    return plain_quantize_rows(x.transpose(-2, -1).contiguous())


def multiply_quantized(x: QuantizedRows, weight: QuantizedRows, dtype: torch.dtype) -> Tensor:
    """Rows x [t, k] times each row of a weight [n, k]. [t, n]"""
    fused = find_kernels("float8", x.values)
    if fused and fused.can_multiply(x.values, dtype):
        result: Tensor = fused.dense_product(x.values, x.scales, weight.values, weight.scales)
        return result
    return functional.linear(x.dequantize(dtype), weight.dequantize(dtype))
