"""Multi-head latent attention: keys and values come out of one compressed vector a token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moejob_api.models.shape import LatentAttention as LatentShape
from moejob_trainer.layers.attention import attended
from moejob_trainer.layers.norm import RMSNorm
from moejob_trainer.layers.rotary import rotated
from moejob_trainer.model.linear import Linear, OutputLinear, TensorShare, mark_partial
from moejob_trainer.model.row import Row


class LatentAttention(nn.Module):
    """The projections down are whole on every tensor rank and see its own rows only; those up are divided by heads."""

    def __init__(self, shape: LatentShape, hidden: int, share: TensorShare, *, scale: float, epsilon: float) -> None:
        super().__init__()
        self.shape, self.share, self.scale = shape, share, scale
        self.heads = share.divided(shape.heads, "attention heads")
        query_dim, latent = shape.nope_dim + shape.rope_dim, shape.key_value_rank
        if shape.query_rank is None:
            self.query = Linear((self.heads, query_dim), (hidden,))
        else:
            self.query_down = Linear((shape.query_rank,), (hidden,), bias=shape.bias)
            self.query_down_norm = RMSNorm(shape.query_rank, epsilon)
            self.query_up = Linear((self.heads, query_dim), (shape.query_rank,))
        self.key_value_down = Linear((latent + shape.rope_dim,), (hidden,), bias=shape.bias)
        self.key_value_down_norm = RMSNorm(latent, epsilon)
        self.key_value_up = Linear((self.heads, shape.nope_dim + shape.value_dim), (latent,))
        self.output = OutputLinear(hidden, (self.heads, shape.value_dim), share, bias=shape.bias)
        for name, parameter in self.named_parameters():
            if "_down" in name:
                mark_partial(parameter, is_partial=share.sequence_parallel)

    def forward(self, x: Tensor, row: Row) -> Tensor:
        """[t, h] -> [t, h]"""
        nope, rope = self.shape.nope_dim, self.shape.rope_dim
        query = self._query(x)
        latent, key_rope = self.key_value_down(x).split([self.shape.key_value_rank, rope], dim=-1)
        key_value = self.key_value_up(self.share.entered(self.key_value_down_norm(latent)))
        key_nope, value = key_value.split([nope, self.shape.value_dim], dim=-1)
        key_rope = self._rotated(self._all_rows(key_rope).unsqueeze(1), row).expand(-1, self.heads, -1)
        query = torch.cat([query[..., :nope], self._rotated(query[..., nope:], row)], dim=-1)
        key = torch.cat([key_nope, key_rope], dim=-1)
        group = row.context_group
        return self.output(attended(query, key, value, row.documents, scale=self.scale, context_group=group))

    def _query(self, x: Tensor) -> Tensor:
        if self.shape.query_rank is None:
            return self.query(self.share.entered(x))
        return self.query_up(self.share.entered(self.query_down_norm(self.query_down(x))))

    def _all_rows(self, key_rope: Tensor) -> Tensor:
        """The part of the keys that all heads share, for all rows: each rank's heads add to its gradient."""
        return self.share.entered(key_rope)

    @staticmethod
    def _rotated(x: Tensor, row: Row) -> Tensor:
        return rotated(x, row.cosine, row.sine, interleaved=row.interleaved)
