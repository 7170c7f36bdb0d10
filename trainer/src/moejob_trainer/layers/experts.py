"""Linear maps of many experts at once, over rows sorted by expert."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from moejob_trainer.layers.float8 import Float8Weight, QuantizedRows, quantize_rows
from moejob_trainer.layers.gradient_sums import GradientSum
from moejob_trainer.layers.kernels import ALIGNMENT_BYTES, find_kernels
from moejob_trainer.layers.precision import at_least_float32, matrix_product, needs_float32_products

# torch 2.11 has it under its other name.
grouped_mm = getattr(functional, "grouped_mm", None) or torch._grouped_mm  # noqa: SLF001


def grouped_linear(
    x: Tensor,
    weight: Tensor,
    bounds: Tensor,
    *,
    total: GradientSum | None = None,
    float8: Float8Weight | None = None,
) -> Tensor:
    """Each row times its expert's weight.

    x [r, k] sorted by expert, weight [e, n, k], bounds int32 [e + 1] -> [r, n]
    bounds: the first row of each expert, and the end of the last expert's rows.
    total: the sum that the weight's gradient is added to, instead of a gradient for autograd.
    float8: the weight's roundings, where products are of FP8 numbers.
    """
    product: Tensor = _GroupedLinear.apply(x, weight, bounds, total, float8)
    return product


def add_biases(y: Tensor, bias: Tensor, bounds: Tensor) -> Tensor:
    """Rows y [r, n], each plus its expert's bias [e, n]. [r, n]"""
    return y + repeat_biases(bias, bounds, len(y))


def repeat_biases(bias: Tensor, bounds: Tensor, rows: int) -> Tensor:
    """Each expert's bias [e, n], once for each of its rows. [r, n]"""
    repeated: Tensor = _RepeatBiases.apply(bias, bounds.diff(), rows)
    return repeated


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        weight: Tensor,
        bounds: Tensor,
        total: GradientSum | None,
        float8: Float8Weight | None,
    ) -> Tensor:
        context.total, context.float8 = total, float8
        context.save_for_backward(x, weight, bounds)
        if float8 is None:
            return _grouped_product(x, weight.transpose(1, 2), bounds)
        return _float8_product(x, float8.quantize_by_inputs(weight), bounds)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        x, weight, bounds = context.saved_tensors
        # The sum of a loss hands down a gradient of stride 0, which the kernel refuses.
        gradient = gradient.contiguous()
        x_gradient = weight_gradient = None
        if context.needs_input_grad[0] and context.float8 is None:
            x_gradient = _grouped_product(gradient, weight, bounds)
        elif context.needs_input_grad[0]:
            x_gradient = _float8_product(gradient, context.float8.quantize_by_outputs(weight), bounds)
        if context.needs_input_grad[1]:
            weight_gradient = _weight_gradient(gradient, x, bounds, weight, context.total)
        return x_gradient, weight_gradient, None, None, None


class _RepeatBiases(torch.autograd.Function):
    """Each expert's bias, once for each of its rows. Torch's own backward adds thousands of rows in bfloat16."""

    @staticmethod
    def forward(context: Any, bias: Tensor, counts: Tensor, rows: int) -> Tensor:
        context.save_for_backward(counts)
        return bias.repeat_interleave(counts, dim=0, output_size=rows)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (counts,) = context.saved_tensors
        wide = at_least_float32(gradient).contiguous()
        sums = torch.segment_reduce(wide, "sum", lengths=counts.long(), axis=0, unsafe=True, initial=0)
        return sums.to(gradient.dtype), None, None


def _grouped_product(x: Tensor, weights: Tensor, bounds: Tensor) -> Tensor:
    """x [r, k] by weights [e, k, n] -> [r, n]"""
    fused = find_kernels("experts", x)
    if fused and fused.can_multiply(x, weights):
        product: Tensor = fused.grouped_products(x.contiguous(), weights, bounds)
    elif _can_use_kernel(x, *weights.shape[1:]):
        product = grouped_mm(x.contiguous(), weights, offs=bounds[1:])
    else:
        parts = zip(x.tensor_split(bounds[1:-1].tolist()), weights, strict=True)
        product = torch.cat([matrix_product(part, weight) for part, weight in parts])
    return product


def _float8_product(x: Tensor, weights: QuantizedRows, bounds: Tensor) -> Tensor:
    """x [r, k] by weights [e, n, k] -> [r, n]"""
    rows = quantize_rows(x)
    fused = find_kernels("float8", x)
    if fused and fused.can_multiply(rows.values, x.dtype):
        product: Tensor = fused.grouped_products(rows.values, rows.scales, weights.values, weights.scales, bounds)
        return product
    return _grouped_product(rows.dequantize(x.dtype), weights.dequantize(x.dtype).transpose(1, 2), bounds)


def _weight_gradient(
    gradient: Tensor, x: Tensor, bounds: Tensor, weight: Tensor, total: GradientSum | None
) -> Tensor | None:
    """gradient [r, n] by x [r, k] -> [e, n, k]; a placeholder or None where `total` gets the gradient"""
    if total is None:
        return _outer_products(gradient, x, bounds)
    target = total.target_for(weight)
    if total.is_new:
        _write_outer_products(gradient, x, bounds, target)
    else:
        _add_outer_products(gradient, x, bounds, target)
    return total.mark_added(weight)


def _write_outer_products(gradient: Tensor, x: Tensor, bounds: Tensor, target: Tensor) -> None:
    fused = find_kernels("experts", x)
    if fused and fused.can_write(gradient, x, target):
        fused.write_outer_products(gradient, x.contiguous(), bounds, target)
    else:
        target.copy_(_outer_products(gradient, x, bounds))


def _add_outer_products(gradient: Tensor, x: Tensor, bounds: Tensor, target: Tensor) -> None:
    fused = find_kernels("experts", x)
    if fused and fused.can_add(gradient, x, target):
        fused.add_outer_products(gradient, x.contiguous(), bounds, target)
    else:
        target += _outer_products(gradient, x, bounds)


def _outer_products(gradient: Tensor, x: Tensor, bounds: Tensor) -> Tensor:
    """gradient [r, n] by x [r, k] -> [e, n, k]"""
    if _can_use_kernel(x, x.shape[1], gradient.shape[1]):
        products: Tensor = grouped_mm(gradient.t(), x.contiguous(), offs=bounds[1:])
        return products
    inner = bounds[1:-1].tolist()
    pairs = zip(gradient.tensor_split(inner), x.tensor_split(inner), strict=True)
    return torch.stack([matrix_product(rows.t(), part) for rows, part in pairs])


def _can_use_kernel(rows: Tensor, *widths: int) -> bool:
    """Return whether the grouped kernel supports this precision and these widths, and has rows to work on."""
    if rows.dtype not in (torch.float32, torch.bfloat16, torch.float16) or rows.shape[0] == 0:
        return False
    # One expert at a time is widened then: float32 copies of all experts would take twice their memory.
    if needs_float32_products(rows):
        return False
    return all(width > 0 and width * rows.element_size() % ALIGNMENT_BYTES == 0 for width in widths)
