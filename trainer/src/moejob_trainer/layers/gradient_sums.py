"""Sums of weight gradients over micro batches, to which a product adds its own gradient.

Autograd would write each gradient to a new tensor, and read it again to add it. Experts have many weights for few rows:
the extra pass over [e, n, k] numbers can take as long as the product itself (H200).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor, nn


class GradientSum(Protocol):
    """The place where a product leaves the gradient of its weight, instead of returning it to autograd."""

    @property
    def is_new(self) -> bool:
        """Return whether the memory has no sum yet: the product overwrites it."""

    def target_for(self, weight: Tensor) -> Tensor:
        """Return the memory for the gradient, in the shape in which the product has the weight."""

    def mark_added(self, weight: Tensor) -> Tensor | None:
        """Note that the gradient is added, and return a placeholder or None for autograd."""


@dataclass(frozen=True, slots=True)
class MainGradient:
    """The sum of one parameter's gradients in Megatron's buffers: `main_grad`."""

    # Megatron fills its buffers with zeros before each update.
    is_new: ClassVar[bool] = False
    parameter: nn.Parameter

    def target_for(self, weight: Tensor) -> Tensor:
        """The parameter's part of Megatron's buffer, in the weight's shape."""
        total: Tensor = self.parameter.main_grad  # type: ignore[attr-defined]
        return total.view(weight.shape)

    def mark_added(self, weight: Tensor) -> Tensor:
        """Megatron's hook waits for a gradient, and drops it.

        Until the buffers are emptied it drops every gradient of this parameter, so all of them have to be added here.
        """
        self.parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return weight.new_empty(weight.shape)


@dataclass(frozen=True, slots=True)
class LocalGradient:
    """The gradient of a parameter that no other rank has; autograd adds to the same tensor."""

    is_new: ClassVar[bool] = False
    parameter: nn.Parameter

    def target_for(self, weight: Tensor) -> Tensor:
        """The parameter's own `grad`, in the weight's shape."""
        if self.parameter.grad is None:
            raise RuntimeError("products add to a gradient that exists as long as the parameter is trained")
        return self.parameter.grad.view(weight.shape)

    def mark_added(self, _: Tensor) -> None:
        """Return no gradient: the sum has it."""


def find_gradient_sum(parameter: nn.Parameter) -> GradientSum | None:
    """Return the sum of a parameter's gradients; None for a frozen parameter and for one of fully_shard."""
    replica_sum: GradientSum | None = getattr(parameter, "gradient_sum", None)
    if replica_sum is not None:
        return replica_sum
    return None if getattr(parameter, "main_grad", None) is None else MainGradient(parameter)
