"""Multi-head latent attention: keys and values come out of one compressed vector a token."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from moejob_api.job.training import RecomputeModule
from moejob_api.models.shape import LatentAttention as LatentShape
from moejob_trainer.layers.attention import compute_attention
from moejob_trainer.layers.norm import RMSNorm
from moejob_trainer.layers.rotary import rotate_heads
from moejob_trainer.model.attention import AttentionSettings
from moejob_trainer.model.linear import Linear, OutputLinear, TensorShare, mark_partial
from moejob_trainer.model.packed_batch import PackedBatch
from moejob_trainer.model.recompute import maybe_recompute

# Transformers' code for DeepSeek-V2 and V3, like DeepSeek's own, norms compressed vectors with this, whatever
# rms_norm_eps says (1e-5 for Moonlight).
COMPRESSED_NORM_EPSILON = 1e-6


class MultiLatentAttention(nn.Module):
    """The projections down are whole on every tensor rank and see its own rows only; those up are divided by heads."""

    def __init__(self, shape: LatentShape, hidden: int, share: TensorShare, settings: AttentionSettings) -> None:
        super().__init__()
        self.shape, self.share, self.settings = shape, share, settings
        self.heads = share.local_size(shape.heads, "attention heads")
        query_dim, latent = shape.nope_dim + shape.rope_dim, shape.key_value_rank
        if shape.query_rank is None:
            self.query = Linear((self.heads, query_dim), (hidden,))
        else:
            self.query_down = Linear((shape.query_rank,), (hidden,), bias=shape.bias)
            self.query_down_norm = RMSNorm(shape.query_rank, COMPRESSED_NORM_EPSILON)
            self.query_up = Linear((self.heads, query_dim), (shape.query_rank,))
        self.key_value_down = Linear((latent + shape.rope_dim,), (hidden,), bias=shape.bias)
        self.key_value_down_norm = RMSNorm(latent, COMPRESSED_NORM_EPSILON)
        self.key_value_up = Linear((self.heads, shape.nope_dim + shape.value_dim), (latent,))
        self.output = OutputLinear(hidden, (self.heads, shape.value_dim), share, bias=shape.bias)
        for name, parameter in self.named_parameters():
            if "_down" in name:
                mark_partial(parameter, is_partial=share.sequence_parallel)

    def forward(self, x: Tensor, packed: PackedBatch) -> Tensor:
        """Attend with keys and values made of a compressed vector. [t, h] -> [t, h]"""
        query = self._query_input(x)
        latent, key_rope = self.key_value_down(x).split([self.shape.key_value_rank, self.shape.rope_dim], dim=-1)
        latent = self.key_value_down_norm(latent)
        recomputes_projection = RecomputeModule.LATENT_UP_PROJECTION in self.settings.recompute
        return self.output(
            maybe_recompute(recomputes_projection, self._project_and_attend, query, latent, key_rope, packed)
        )

    def _project_and_attend(self, query: Tensor, latent: Tensor, key_rope: Tensor, packed: PackedBatch) -> Tensor:
        """Compute attention from the compressed vectors.

        It keeps what these become, many times their size, so computing them again means computing attention again.
        """
        nope = self.shape.nope_dim
        if self.shape.query_rank is not None:
            (query,) = self.share.multiply_columns(query, self.query_up)
        (key_value,) = self.share.multiply_columns(latent, self.key_value_up)
        key_nope, value = key_value.split([nope, self.shape.value_dim], dim=-1)
        # The part of the keys that all heads share, for all rows: each rank's heads add to its gradient.
        key_rope = self._rotate_heads(self.share.gather_input(key_rope).unsqueeze(1), packed).expand(-1, self.heads, -1)
        query = torch.cat([query[..., :nope], self._rotate_heads(query[..., nope:], packed)], dim=-1)
        key = torch.cat([key_nope, key_rope], dim=-1)
        recomputes_core = RecomputeModule.CORE_ATTENTION in self.settings.recompute
        return maybe_recompute(recomputes_core, self._compute_attention, query, key, value, packed)

    def _compute_attention(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedBatch) -> Tensor:
        scale, group = self.settings.scale, packed.context_group
        return compute_attention(query, key, value, packed.documents, scale=scale, context_group=group)

    def _query_input(self, x: Tensor) -> Tensor:
        """Return the input of queries: the compressed vector of each token where there is one."""
        if self.shape.query_rank is None:
            (query,) = self.share.multiply_columns(x, self.query)
            return query
        return self.query_down_norm(self.query_down(x))

    @staticmethod
    def _rotate_heads(x: Tensor, packed: PackedBatch) -> Tensor:
        return rotate_heads(x, packed.cosine, packed.sine, interleaved=packed.interleaved)
