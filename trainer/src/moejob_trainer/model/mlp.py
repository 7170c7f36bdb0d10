"""The gated feed-forward network of a layer without experts, and of the expert that all tokens share."""

from __future__ import annotations

from torch import Tensor, nn

from moejob_trainer.layers.activation import swiglu
from moejob_trainer.model.linear import Linear, OutputLinear, TensorShare
from moejob_trainer.model.recompute import recomputed


class GatedMLP(nn.Module):
    """down(silu(gate(x)) * up(x)), its features divided over the tensor group."""

    def __init__(
        self, hidden: int, features: int, share: TensorShare, *, bias: bool = False, is_recomputed: bool = False
    ) -> None:
        super().__init__()
        self.share, self.is_recomputed = share, is_recomputed
        own = share.divided(features, "features of the feed-forward network")
        self.gate_up = Linear((2, own), (hidden,), bias=bias)
        self.down = OutputLinear(hidden, (own,), share, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        """[t, h] -> [t, h]"""
        return recomputed(self.is_recomputed, self._computed, x)

    def _computed(self, x: Tensor) -> Tensor:
        (gate_up,) = self.share.into(x, self.gate_up)
        return self.down(swiglu(gate_up, None))
