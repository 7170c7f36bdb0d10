"""One layer of the model: attention, then a feed-forward network or experts."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import assert_never

import torch
from torch import Tensor, nn

from moejob_api.derived import balancing_method, recomputed_modules
from moejob_api.job.job import Spec
from moejob_api.job.training import RecomputeModule
from moejob_api.models.shape import DenseMLP, Experts, GroupedAttention, LinearAttention
from moejob_api.models.shape import LatentAttention as LatentShape
from moejob_api.models.shape import Layer as LayerShape
from moejob_trainer.distributed.groups import Groups
from moejob_trainer.layers.norm import RMSNorm
from moejob_trainer.model.architecture import Architecture
from moejob_trainer.model.attention import Attention, AttentionSettings
from moejob_trainer.model.gated_delta_net import GatedDeltaNet
from moejob_trainer.model.linear import TensorShare, mark_partial
from moejob_trainer.model.mlp import GatedMLP
from moejob_trainer.model.moe_layer import MoELayer, MoESettings
from moejob_trainer.model.multi_latent_attention import MultiLatentAttention
from moejob_trainer.model.packed_batch import PackedBatch
from moejob_trainer.model.recompute import maybe_discard, maybe_recompute


class TransformerLayer(nn.Module):
    """Attention, then a feed-forward network or experts, each behind a norm and beside a residual."""

    def __init__(
        self, shape: LayerShape, model: Architecture, spec: Spec, groups: Groups, number: int | None = None
    ) -> None:
        """`number` is the layer's index in the model; None in an MTP module."""
        super().__init__()
        hidden = model.shape.hidden
        share = TensorShare(groups.tensor, spec.parallelism.sequence_parallel)
        self.recompute = recomputed_modules(spec.training.recompute)
        self.attention_norm = make_norm(hidden, model, share)
        self.attention = _make_attention(shape, model, share, self.recompute)
        self.mlp_norm = make_norm(hidden, model, share)
        match shape.mlp:
            case DenseMLP(intermediate, bias):
                self.mlp = GatedMLP(hidden, intermediate, share, bias=bias)
            case Experts() as experts:
                settings = moe_settings(model, spec)
                self.moe = MoELayer(experts, hidden, groups, share, settings)
                self.moe.number = number

    def forward(self, x: Tensor, packed: PackedBatch) -> Tensor:
        """Add attention, then the feed-forward network or the experts. [t, h] -> [t, h]"""
        # Pre-norm: x + attention(norm(x)), then the same with the feed-forward network or experts.
        x = x + maybe_discard(self._discards_norms, self.attention_norm, partial(self.attention, packed=packed), x)
        recomputed_module = RecomputeModule.EXPERTS if hasattr(self, "moe") else RecomputeModule.MLP
        return x + maybe_recompute(recomputed_module in self.recompute, self._feed_forward, x, packed)

    def _feed_forward(self, x: Tensor, packed: PackedBatch) -> Tensor:
        feed_forward = partial(self.moe, packed=packed) if hasattr(self, "moe") else self.mlp
        return maybe_discard(self._discards_norms, self.mlp_norm, feed_forward, x)

    @property
    def _discards_norms(self) -> bool:
        return RecomputeModule.NORMS in self.recompute


def moe_settings(model: Architecture, spec: Spec) -> MoESettings:
    """Return the settings of every layer's experts."""
    if model.routing is None:
        raise ValueError(f"{model.shape.family} has no rule for choosing experts")
    routing = replace(model.routing, dtype=getattr(torch, spec.moe.router_dtype.value))
    recomputed_parts = recomputed_modules(spec.training.recompute)
    return MoESettings(spec.moe, balancing_method(spec), routing, model.gate_limit, recomputed_parts)


def make_norm(hidden: int, model: Architecture, share: TensorShare) -> RMSNorm:
    """A norm of hidden states, which every tensor rank holds."""
    rms_norm = RMSNorm(hidden, model.norm_epsilon, zero_centred=model.zero_centred_norms)
    mark_partial(rms_norm.weight, is_partial=share.sequence_parallel)
    return rms_norm


def _make_attention(
    shape: LayerShape, model: Architecture, share: TensorShare, recompute: frozenset[RecomputeModule]
) -> nn.Module:
    settings = AttentionSettings(model.attention_scale, model.norm_epsilon, model.zero_centred_norms, recompute)
    match shape.attention:
        case GroupedAttention() as grouped:
            return Attention(grouped, model.shape.hidden, share, settings)
        case LatentShape() as latent:
            return MultiLatentAttention(latent, model.shape.hidden, share, settings)
        case LinearAttention() as linear:
            return GatedDeltaNet(linear, model.shape.hidden, share, model.norm_epsilon)
        case _:
            assert_never(shape.attention)
