"""Root mean square normalisation over all heads together, which tensor ranks divide."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from moejob_trainer.distributed.collectives import sum_over_group
from moejob_trainer.distributed.groups import Group
from moejob_trainer.layers.precision import at_least_float32


class JointNorm(nn.Module):
    """Heads [t, n, d] over the root mean square of `size` numbers, those of all ranks of the group."""

    def __init__(self, local_shape: tuple[int, int], size: int, group: Group | None, epsilon: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(local_shape))
        self.size, self.group, self.epsilon = size, group, epsilon

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = _JointNorm.apply(x, self.weight, self)
        return y


class _JointNorm(torch.autograd.Function):
    """y = x s w with s = (sum(x^2) / size + epsilon)^-1/2. The backward pass widens its inputs again."""

    @staticmethod
    def forward(context: Any, x: Tensor, weight: Tensor, norm: JointNorm) -> Tensor:
        wide = at_least_float32(x)
        scale = (_sum_heads(wide.square(), norm.group) / norm.size + norm.epsilon).rsqrt()
        context.save_for_backward(x, weight, scale)
        context.size, context.group = norm.size, norm.group
        return (wide * scale * at_least_float32(weight)).to(x.dtype)

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, scale = context.saved_tensors
        wide, wide_gradient = at_least_float32(x), at_least_float32(gradient)
        weighted = wide_gradient * at_least_float32(weight)
        # Every number of a token moves the scale of all: dx = s g w - x s^3 / size * sum(g w x).
        moved = _sum_heads(weighted * wide, context.group) * scale.pow(3) / context.size
        x_gradient = weighted * scale - wide * moved
        weight_gradient = (wide_gradient * wide * scale).sum(0)
        return x_gradient.to(x.dtype), weight_gradient.to(weight.dtype), None


def _sum_heads(x: Tensor, group: Group | None) -> Tensor:
    """[t, n, d] -> [t, 1, 1]"""
    total = x.sum((-2, -1), keepdim=True)
    return total if group is None else sum_over_group(total, group)
