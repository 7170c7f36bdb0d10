"""The gated feed-forward network of a layer without experts, and of the expert that all tokens share."""

from __future__ import annotations

from torch import Tensor, nn

from moejob_trainer.layers.activation import swiglu
from moejob_trainer.model.linear import Linear, OutputLinear, TensorShare
from moejob_trainer.model.recompute import maybe_recompute


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), its features divided over the tensor group."""

    def __init__(
        self, hidden: int, features: int, share: TensorShare, *, bias: bool = False, is_recomputed: bool = False
    ) -> None:
        super().__init__()
        self.share, self.is_recomputed = share, is_recomputed
        local_features = share.local_size(features, "features of the feed-forward network")
        self.gate_up = Linear((2, local_features), (hidden,), bias=bias)
        self.down = OutputLinear(hidden, (local_features,), share, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """Map each token by itself. [t, h] -> [t, h]"""
        return maybe_recompute(self.is_recomputed, self._feed_forward, x)

    def _feed_forward(self, x: Tensor) -> Tensor:
        (gate_up,) = self.share.multiply_columns(x, self.gate_up)
        return self.down(swiglu(gate_up, None))
