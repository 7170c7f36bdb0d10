"""Activations between the two linear maps of an expert or a dense block."""

from __future__ import annotations

from torch import Tensor
from torch.nn import functional

from moejob_trainer.layers.kernels import find_kernels
from moejob_trainer.layers.precision import at_least_float32


def swiglu(gate_up: Tensor, probabilities: Tensor | None = None) -> Tensor:
    """silu(gate) * up, times each row's probability when given; computed in float32 and rounded once.

    gate_up [r, 2, f], probabilities [r] -> [r, f]
    """
    fused = find_kernels("activation", gate_up)
    if fused:
        activated: Tensor = fused.swiglu(gate_up, probabilities)
        return activated
    return plain_swiglu(gate_up, probabilities)


def plain_swiglu(gate_up: Tensor, probabilities: Tensor | None = None) -> Tensor:
    """`swiglu` in the operations of torch."""
    # silu(x) = x * sigmoid(x); probabilities weigh rows here, before `down`, which is linear.
    gate, up = at_least_float32(gate_up).unbind(1)
    return _apply_probabilities(functional.silu(gate) * up, probabilities).to(gate_up.dtype)


def clamped_swiglu(
    gate_up: Tensor, probabilities: Tensor | None = None, *, limit: float = 7.0, steepness: float = 1.702
) -> Tensor:
    """The activation of gpt-oss: both halves clamped, the gate by a steeper sigmoid, and one added to `up`.

    gate_up [r, 2, f], probabilities [r] -> [r, f]
    """
    fused = find_kernels("activation", gate_up)
    if fused:
        activated: Tensor = fused.clamped_swiglu(gate_up, probabilities, limit, steepness)
        return activated
    return plain_clamped_swiglu(gate_up, probabilities, limit=limit, steepness=steepness)


def plain_clamped_swiglu(gate_up: Tensor, probabilities: Tensor | None, *, limit: float, steepness: float) -> Tensor:
    """`clamped_swiglu` in the operations of torch."""
    gate, up = at_least_float32(gate_up).unbind(1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    activated = (up + 1) * gate * (gate * steepness).sigmoid()
    return _apply_probabilities(activated, probabilities).to(gate_up.dtype)


def _apply_probabilities(activated: Tensor, probabilities: Tensor | None) -> Tensor:
    return activated if probabilities is None else activated * at_least_float32(probabilities)[:, None]
