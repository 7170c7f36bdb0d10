"""The matrices of a stage that multiply in FP8: of attention, of feed-forward networks and of experts.

Routers, embeddings, the output layer, norms and adapters keep the model's type, and so does a matrix unless both widths
of a rank's part are multiples of 16.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from moejob_trainer.layers.float8 import WIDTH_MULTIPLE, Float8Weight
from moejob_trainer.model.linear import Linear, OutputLinear
from moejob_trainer.model.moe_layer import LocalExperts


def use_float8(stage: nn.Module, *, keeps: bool) -> None:
    """Let these matrices multiply in FP8. keeps: their roundings are used by all micro batches of a pass."""
    for module in stage.modules():
        if isinstance(module, Linear | OutputLinear) and _is_supported_width(*module.widths):
            module.float8 = Float8Weight(keeps=keeps)
        if isinstance(module, LocalExperts) and _is_supported_width(module.hidden, module.features):
            module.gate_up_float8, module.down_float8 = Float8Weight(keeps=keeps), Float8Weight(keeps=keeps)


def forget_roundings(stage: nn.Module) -> None:
    """Drop the roundings of all weights, before an update changes these."""
    for _, _, weight in _float8_weights(stage):
        weight.discard_roundings()


@contextmanager
def without_float8(stage: nn.Module) -> Iterator[None]:
    """Let all matrices multiply in the model's type, as Transformers and vLLM do with the exported model."""
    float8_weights = [*_float8_weights(stage)]
    for module, name, _ in float8_weights:
        setattr(module, name, None)
    try:
        yield
    finally:
        for module, name, weight in float8_weights:
            setattr(module, name, weight)


def _float8_weights(stage: nn.Module) -> Iterator[tuple[nn.Module, str, Float8Weight]]:
    for module in stage.modules():
        yield from ((module, name, value) for name, value in vars(module).items() if isinstance(value, Float8Weight))


def _is_supported_width(*widths: int) -> bool:
    # All widths are multiples of a number if their greatest common divisor is one.
    return math.gcd(*widths) % WIDTH_MULTIPLE == 0
