"""A linear map that multiplies in FP8 if asked to, and whose weight gradient is added to its sum inside the product,
where both are of one type."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from moejob_trainer.layers.float8 import Float8Weight, multiply_quantized, quantize_rows
from moejob_trainer.layers.gradient_sums import GradientSum
from moejob_trainer.layers.precision import at_least_float32, matrix_product, needs_float32_products


def summed_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    total: GradientSum | None = None,
    float8: Float8Weight | None = None,
) -> Tensor:
    """x [t, k] times weight [n, k], plus bias [n]. [t, n]

    total: the sum that the weight's gradient is added to; autograd would round it, and read it once more.
    float8: the weight's roundings, where products are of FP8 numbers.
    """
    if total is not None and not can_add_to(total, weight):
        total = None
    if total is None and float8 is None and not needs_float32_products(x):
        return functional.linear(x, weight, bias)
    y: Tensor = _SummedLinear.apply(x, weight, bias, total, float8)
    return y


def can_add_to(total: GradientSum, weight: Tensor) -> bool:
    """Return whether a product of the weight's type can add to this sum."""
    return not total.is_new and weight.requires_grad and total.target_for(weight).dtype is weight.dtype


def forward_product(x: Tensor, weight: Tensor, bias: Tensor | None, float8: Float8Weight | None) -> Tensor:
    """x [t, k] times weight [n, k], plus bias [n], without a gradient. [t, n]"""
    if float8 is None and needs_float32_products(x):
        wide_bias = None if bias is None else at_least_float32(bias)
        return functional.linear(at_least_float32(x), at_least_float32(weight), wide_bias).to(x.dtype)
    if float8 is None:
        return functional.linear(x, weight, bias)
    y = multiply_quantized(quantize_rows(x), float8.quantize_by_inputs(weight), x.dtype)
    return y if bias is None else y + bias


def input_gradient(gradient: Tensor, weight: Tensor, float8: Float8Weight | None) -> Tensor:
    """gradient [t, n] by weight [n, k]. [t, k]"""
    if float8 is None:
        return matrix_product(gradient, weight)
    return multiply_quantized(quantize_rows(gradient), float8.quantize_by_outputs(weight), gradient.dtype)


def weight_gradient(gradient: Tensor, x: Tensor, weight: Tensor, total: GradientSum | None) -> Tensor | None:
    """gradient [t, n] by x [t, k] -> [n, k]; with a sum, add to it and return a placeholder or None."""
    if total is None:
        return matrix_product(gradient.t(), x)
    target = total.target_for(weight)
    if needs_float32_products(x):
        # addmm_ in bfloat16 on such a CPU would multiply one number at a time.
        target.copy_(at_least_float32(target).addmm_(at_least_float32(gradient).t(), at_least_float32(x)))
    else:
        target.addmm_(gradient.t(), x)
    return total.mark_added(weight)


class _SummedLinear(Function):
    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        total: GradientSum | None,
        float8: Float8Weight | None,
    ) -> Tensor:
        context.save_for_backward(x if context.needs_input_grad[1] else None, weight)
        context.total, context.float8 = total, float8
        return forward_product(x, weight, bias, float8)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        x, weight = context.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = context.needs_input_grad
        return (
            input_gradient(gradient, weight, context.float8) if needs_x else None,
            weight_gradient(gradient, x, weight, context.total) if needs_weight else None,
            gradient.sum(0) if needs_bias else None,
            None,
            None,
        )
