"""Sums of weight gradients over micro batches, to which a product adds its own.

Autograd hands a gradient on as a tensor of its own, which is read again to be added to the sum. Experts have many
weights for the rows that each of them sees: adding takes them up to as long as the product itself (H200).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

from torch import Tensor, nn


class GradientSum(Protocol):
    """The place where a product leaves the gradient of its weight, instead of handing it to autograd."""

    @property
    def is_new(self) -> bool:
        """Return whether there is nothing to be added to: the gradient is written over what lies there."""

    def like(self, weight: Tensor) -> Tensor:
        """Return what takes the gradient, in the shape in which a product sees the weight."""

    def added(self, weight: Tensor) -> Tensor | None:
        """Take note that the gradient is there, and return what autograd is given in its place: no numbers."""


@dataclass(frozen=True, slots=True)
class MainGradient:
    """The sum of one parameter's gradients in Megatron's buffers: `main_grad`."""

    is_new: ClassVar[bool] = False
    parameter: nn.Parameter

    def like(self, weight: Tensor) -> Tensor:
        """The sum of all micro batches."""
        total: Tensor = self.parameter.main_grad  # type: ignore[attr-defined]
        return total.view(weight.shape)

    def added(self, weight: Tensor) -> Tensor:
        """Megatron's hook waits for a gradient, and drops it.

        Until the buffers are emptied it drops every gradient of this parameter, so all of them have to be added here.
        """
        self.parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return weight.new_empty(weight.shape)


@dataclass(frozen=True, slots=True)
class OwnGradient:
    """The gradient of a parameter that no other rank has: autograd would add to it, too."""

    is_new: ClassVar[bool] = False
    parameter: nn.Parameter

    def like(self, weight: Tensor) -> Tensor:
        """The sum of all micro batches."""
        if self.parameter.grad is None:
            raise RuntimeError("products add to a gradient that exists as long as the parameter is trained")
        return self.parameter.grad.view(weight.shape)

    def added(self, _: Tensor) -> None:
        """The sum has it."""


def gradient_sum(parameter: nn.Parameter) -> GradientSum | None:
    """The sum of this parameter, or None where gradients are autograd's: frozen, not trained, of fully_shard."""
    of_replicas: GradientSum | None = getattr(parameter, "gradient_sum", None)
    if of_replicas is not None:
        return of_replicas
    return None if getattr(parameter, "main_grad", None) is None else MainGradient(parameter)
