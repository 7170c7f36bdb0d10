"""The precision that a layer computes in, whatever its tensors are stored in."""

from __future__ import annotations

import torch
from torch import Tensor


def widened(x: Tensor) -> Tensor:
    """`x` in float32, or as it is where that would lose digits."""
    return x.to(torch.promote_types(x.dtype, torch.float32))
