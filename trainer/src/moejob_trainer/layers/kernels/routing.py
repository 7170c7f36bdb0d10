"""The router's float32 product on tensor cores, for tokens and weights that are kept in bfloat16.

Products of two bfloat16 numbers are exact in float32, which tensor cores add up in. A float32 gradient is three
bfloat16 numbers (8 bits of its 24 each), so its products are three products side by side.
"""

from __future__ import annotations

import torch
from torch import Tensor

_PARTS = 3


def wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """Twin of `routing.plain_wide_product` for bfloat16 x [t, h] and weight [E, h]. float32 [t, E]"""
    return torch.mm(x, weight.t(), out_dtype=torch.float32)


def input_gradient(gradient: Tensor, weight: Tensor) -> Tensor:
    """Twin of `routing.plain_input_gradient`. float32 [t, E], [E, h] -> [t, h]"""
    return torch.mm(_parts(gradient), weight.repeat(_PARTS, 1))


def weight_gradient(gradient: Tensor, x: Tensor) -> Tensor:
    """Twin of `routing.plain_weight_gradient`. float32 [t, E], [t, h] -> [E, h]"""
    products = torch.mm(_parts(gradient).t(), x, out_dtype=torch.float32)
    return products.view(_PARTS, gradient.shape[1], -1).sum(0).to(x.dtype)


def _parts(gradient: Tensor) -> Tensor:
    """The sum of its three blocks is the gradient. float32 [t, E] -> bfloat16 [t, 3 E]"""
    parts, rest = [], gradient
    for _ in range(_PARTS):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1]
    return torch.cat(parts, 1)
