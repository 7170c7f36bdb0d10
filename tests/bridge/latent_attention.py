"""The core of latent attention: Megatron's own, without Transformer Engine, takes no values narrower than keys."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn import functional


class CausalAttention(nn.Module):
    """Scaled dot products of every token with those before it."""

    def __init__(self, *, softmax_scale: float, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> Tensor:
        """[t, b, n, d] each -> [t, b, n * d]"""
        query, key, value = (part.permute(1, 2, 0, 3) for part in (query, key, value))
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=self.scale)
        return mixed.permute(2, 0, 1, 3).flatten(2)
