"""Self-attention whose query heads share keys and values in groups."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from moejob_api.job.training import RecomputeModule
from moejob_api.models.shape import GroupedAttention
from moejob_trainer.layers.attention import compute_attention
from moejob_trainer.layers.norm import RMSNorm
from moejob_trainer.layers.rotary import rotate_heads
from moejob_trainer.model.joint_norm import JointNorm
from moejob_trainer.model.linear import Linear, OutputLinear, TensorShare, mark_partial
from moejob_trainer.model.packed_batch import PackedBatch
from moejob_trainer.model.recompute import maybe_recompute


@dataclass(frozen=True, slots=True)
class AttentionSettings:
    """Settings of attention beside its shape."""

    scale: float
    epsilon: float
    zero_centred_norms: bool
    recompute: frozenset[RecomputeModule]


class Attention(nn.Module):
    """Grouped-query attention with the extras that families add: head norms, biases, sinks, a window, a gate."""

    def __init__(self, shape: GroupedAttention, hidden: int, share: TensorShare, settings: AttentionSettings) -> None:
        super().__init__()
        self.shape, self.share, self.settings = shape, share, settings
        dim = shape.head_dim
        make_norm = partial(RMSNorm, dim, settings.epsilon, zero_centred=settings.zero_centred_norms)
        self.heads = share.local_size(shape.heads, "attention heads")
        # Fewer groups than ranks: every rank holds all keys and values and uses those of its own heads.
        self.is_replicated = shape.key_value_heads % share.group.size != 0
        groups = shape.key_value_heads if self.is_replicated else shape.key_value_heads // share.group.size
        # Behind each head's query, its gate.
        self.query = Linear((self.heads, dim * (1 + shape.output_gate)), (hidden,), bias=shape.qkv_bias)
        self.key_value = Linear((groups, 2, dim), (hidden,), bias=shape.qkv_bias)
        self.output = OutputLinear(hidden, (self.heads, dim), share, bias=shape.output_bias)
        self.query_norm: nn.Module | None = make_norm() if shape.head_norm else None
        self.key_norm: nn.Module | None = make_norm() if shape.head_norm else None
        if shape.joint_norm:
            key_group = None if self.is_replicated else share.group
            self.query_norm = JointNorm((self.heads, dim), shape.heads * dim, share.group, settings.epsilon)
            self.key_norm = JointNorm((groups, dim), shape.key_value_heads * dim, key_group, settings.epsilon)
        self.sinks = nn.Parameter(self.query.weight.new_empty(self.heads)) if shape.sinks else None
        self._mark_replicas()

    def _mark_replicas(self) -> None:
        norms = [norm.weight for norm in (self.query_norm, self.key_norm) if isinstance(norm, RMSNorm)]
        replicas = [*self.key_value.parameters()] if self.is_replicated else []
        if self.is_replicated and isinstance(self.key_norm, JointNorm):
            replicas.append(self.key_norm.weight)
        for parameter in (*norms, *replicas):
            mark_partial(parameter)

    def forward(self, x: Tensor, packed: PackedBatch) -> Tensor:
        """Attend with the heads of this rank. [t, h] -> [t, h]"""
        query, key_value = self.share.multiply_columns(x, self.query, self.key_value)
        query, gate = query.chunk(2, -1) if self.shape.output_gate else (query, None)
        key, value = key_value.unbind(2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        key, value = self._own_groups(key), self._own_groups(value)
        query, key = (rotate_heads(x, packed.cosine, packed.sine, interleaved=packed.interleaved) for x in (query, key))
        recomputes_core = RecomputeModule.CORE_ATTENTION in self.settings.recompute
        output = maybe_recompute(recomputes_core, self._compute_attention, query, key, value, packed)
        return self.output(output if gate is None else output * gate.sigmoid())

    def _compute_attention(self, query: Tensor, key: Tensor, value: Tensor, packed: PackedBatch) -> Tensor:
        return compute_attention(
            query,
            key,
            value,
            packed.documents,
            scale=self.settings.scale,
            window=self.shape.window,
            sinks=self.sinks,
            context_group=packed.context_group,
        )

    def _own_groups(self, key_value: Tensor) -> Tensor:
        """Keys or values of the groups that this rank's heads belong to. [t, g, d]"""
        if not self.is_replicated:
            return key_value
        per_group = self.shape.heads // self.shape.key_value_heads
        first = self.share.group.rank * self.heads
        groups = {(first + head) // per_group for head in range(self.heads)}
        if self.heads % len(groups) or (len(groups) > 1 and self.heads // len(groups) != per_group):
            # Heads of this rank straddle groups unevenly: give each head its own copy.
            index = [(first + head) // per_group for head in range(self.heads)]
            return key_value[:, index]
        return key_value[:, min(groups) : max(groups) + 1]
