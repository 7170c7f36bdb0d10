"""Root mean square normalisation over the last axis."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moejob_trainer.layers.kernels import find_kernels
from moejob_trainer.layers.precision import at_least_float32


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`x` scaled to a root mean square of one, times `weight`; computed in float32 and rounded once."""
    fused = find_kernels("norm", x)
    if fused and fused.can_fit_row(x):
        output: Tensor = fused.rms_norm(x, weight, eps)
        return output
    return plain_rms_norm(x, weight, eps)


def plain_rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """`rms_norm` in the operations of torch."""
    # The square of a bfloat16 number loses half its bits: sum in float32, as Transformers does.
    wide = at_least_float32(x)
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale * at_least_float32(weight)).to(x.dtype)


class RMSNorm(nn.Module):
    """`rms_norm` with a weight of its own, which a zero-centred norm keeps as the distance from one."""

    def __init__(self, size: int, eps: float, *, zero_centred: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(size) if zero_centred else torch.ones(size))
        self.eps, self.zero_centred = eps, zero_centred

    def forward(self, x: Tensor) -> Tensor:
        # Added in float32: beside a one, bfloat16 would lose most of a small weight.
        weight = at_least_float32(self.weight) + 1.0 if self.zero_centred else self.weight
        return rms_norm(x, weight, self.eps)
