"""Products of matrices with the rows of all ranks of a group; between the passes a rank keeps only its own rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from moejob_trainer.distributed.collectives import start_all_gather, start_reduce_scatter
from moejob_trainer.distributed.groups import Group
from moejob_trainer.layers.float8 import Float8Weight
from moejob_trainer.layers.gradient_sums import GradientSum
from moejob_trainer.layers.summed_linear import can_add_to, forward_product, input_gradient, weight_gradient


def gathered_products(
    x: Tensor,
    group: Group,
    matrices: Sequence[tuple[Tensor, Tensor | None]],
    totals: Sequence[GradientSum | None] | None = None,
    float8s: Sequence[Float8Weight | None] | None = None,
) -> tuple[Tensor, ...]:
    """Multiply the rows of all ranks by each matrix, plus its bias. x [t, k], weights [n, k] -> [ranks * t, n] each.

    totals: for each weight the sum that its gradient is added to; float8s: its FP8 roundings.
    Each rank uses the products differently, so x's gradient is summed over the group. Rows of other ranks are not kept
    for the backward pass but gathered again, while the gradient of x is computed.
    """
    weights, biases = zip(*matrices, strict=True)
    sums = [
        total if total is not None and can_add_to(total, weight) else None
        for weight, total in zip(weights, totals or [None] * len(weights), strict=True)
    ]
    weight_options = [*zip(sums, float8s or [None] * len(weights), strict=True)]
    products: tuple[Tensor, ...] = _GatheredProducts.apply(x, group, weight_options, *weights, *biases)
    return products


class _GatheredProducts(torch.autograd.Function):
    @staticmethod
    def forward(
        context: Any,
        x: Tensor,
        group: Group,
        weight_options: Sequence[tuple[GradientSum | None, Float8Weight | None]],
        *matrices: Tensor,
    ) -> tuple[Tensor, ...]:
        count = len(weight_options)
        weights, biases = matrices[:count], matrices[count:]
        context.group, context.how = group, weight_options
        are_trained = any(context.needs_input_grad[3 : 3 + count])
        context.save_for_backward(x if are_trained else None, *weights)
        gathered_rows = start_all_gather(x, group).wait()
        return tuple(
            forward_product(gathered_rows, weight, bias, float8)
            for weight, bias, (_, float8) in zip(weights, biases, weight_options, strict=True)
        )

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> tuple[Any, ...]:
        x, *weights = context.saved_tensors
        needs_x, needs_weights = context.needs_input_grad[0], context.needs_input_grad[3 : 3 + len(weights)]
        needs_biases = context.needs_input_grad[3 + len(weights) :]
        pending_rows = None if x is None else start_all_gather(x, context.group)
        # Before the weights' gradients, which are computed while this is on its way.
        pending_gradient = (
            start_reduce_scatter(_sum_input_gradients(gradients, weights, context.how), context.group)
            if needs_x
            else None
        )
        gathered_rows = None if pending_rows is None else pending_rows.wait()
        weight_gradients = [
            weight_gradient(gradient, gathered_rows, weight, total) if is_needed and gathered_rows is not None else None
            for gradient, is_needed, weight, (total, _) in zip(
                gradients, needs_weights, weights, context.how, strict=True
            )
        ]
        bias_gradients = [
            gradient.sum(0) if is_needed else None for gradient, is_needed in zip(gradients, needs_biases, strict=True)
        ]
        return (
            None if pending_gradient is None else pending_gradient.wait(),
            None,
            None,
            *weight_gradients,
            *bias_gradients,
        )


def _sum_input_gradients(
    gradients: Sequence[Tensor],
    weights: Sequence[Tensor],
    weight_options: Sequence[tuple[GradientSum | None, Float8Weight | None]],
) -> Tensor:
    total = input_gradient(gradients[0], weights[0], weight_options[0][1])
    for gradient, weight, (_, float8) in zip(gradients[1:], weights[1:], weight_options[1:], strict=True):
        if float8 is None:
            total.addmm_(gradient, weight)
        else:
            total += input_gradient(gradient, weight, float8)
    return total
