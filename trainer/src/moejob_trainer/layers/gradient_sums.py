"""Sums of weight gradients over micro batches, to which a product adds its own.

Autograd hands a gradient on as a tensor of its own, which is read again to be added to the sum. Experts have many
weights for the rows that each of them sees: adding takes them up to as long as the product itself (H200).
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class GradientSum:
    """The sum of one parameter's gradients in Megatron's buffers: `main_grad`."""

    parameter: nn.Parameter

    @classmethod
    def of(cls, parameter: nn.Parameter) -> GradientSum | None:
        """The sum of this parameter, or None where gradients are autograd's: frozen, divided (FSDP), not trained."""
        return None if getattr(parameter, "main_grad", None) is None else cls(parameter)

    def like(self, weight: Tensor) -> Tensor:
        """The sum in the shape in which a product sees the weight."""
        total: Tensor = self.parameter.main_grad  # type: ignore[attr-defined]
        return total.view(weight.shape)

    def added(self, weight: Tensor) -> Tensor:
        """Tell Megatron that the sum has this gradient, and return what autograd is given in its place: no numbers.

        Megatron's hook waits for a gradient, and drops it. Until the buffers are emptied it drops every gradient of
        this parameter, so all of them have to be added here.
        """
        self.parameter.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return weight.new_empty(weight.shape)
