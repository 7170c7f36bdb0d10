"""A linear map whose weight gradient is added to its sum inside the product, where both are of one type."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.nn import functional

from moejob_trainer.layers.gradient_sums import GradientSum


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, total: GradientSum | None = None) -> Tensor:
    """x [t, k] times weight [n, k], plus bias [n]. [t, n]

    total: what the weight's gradient is added to, instead of being handed to autograd, rounded and read once more.
    """
    if total is None or not adds(total, weight):
        return functional.linear(x, weight, bias)
    product: Tensor = _SummedLinear.apply(x, weight, bias, total)
    return product


def adds(total: GradientSum, weight: Tensor) -> bool:
    """Return whether a product of the weight's type can add to this sum."""
    return not total.is_new and weight.requires_grad and total.like(weight).dtype is weight.dtype


def add_gradient(gradient: Tensor, x: Tensor, weight: Tensor, total: GradientSum) -> Tensor | None:
    """Add gradient [t, n] by x [t, k] to the sum, and return what autograd gets in place of it."""
    total.like(weight).addmm_(gradient.t(), x)
    return total.added(weight)


class _SummedLinear(Function):
    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, bias: Tensor | None, total: GradientSum) -> Tensor:
        context.save_for_backward(x, weight)
        context.total = total
        return functional.linear(x, weight, bias)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        x, weight = context.saved_tensors
        of_x, _, of_bias, _ = context.needs_input_grad
        return (
            gradient @ weight if of_x else None,
            add_gradient(gradient, x, weight, context.total),
            gradient.sum(0) if of_bias else None,
            None,
        )
