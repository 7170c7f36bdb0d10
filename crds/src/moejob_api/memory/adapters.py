"""Parameters of LoRA's adapters: two thin matrices beside each target, divided like the matrix they sit on."""

from __future__ import annotations

from typing import assert_never

from moejob_api.job.training import Lora, LoraTarget
from moejob_api.models.parameters import Weights
from moejob_api.models.shape import (
    Attention,
    DenseMLP,
    Experts,
    FeedForward,
    GroupedAttention,
    LatentAttention,
    Layer,
    LinearAttention,
)


def adapter_weights(hidden: int, layer: Layer, lora: Lora) -> Weights:
    """All adapters of one layer. Every published matrix has its own: queries, keys, values, gate, up, each expert."""
    attention = sum(_widths(hidden, layer.attention, target) for target in lora.targets)
    mlp = sum(_mlp_widths(hidden, layer.mlp, target) for target in lora.targets)
    routed = sum(_expert_widths(hidden, layer.mlp, target) for target in lora.targets)
    return Weights(tensor=lora.rank * (attention + mlp), routed=lora.rank * routed)


def _widths(hidden: int, attention: Attention, target: LoraTarget) -> int:
    """Inputs and outputs of the attention's matrices that a target names."""
    if target is LoraTarget.QUERY_KEY_VALUE:
        return _query_key_value(hidden, attention)
    if target is LoraTarget.ATTENTION_OUTPUT:
        return _output(attention) + hidden
    return 0


def _query_key_value(hidden: int, attention: Attention) -> int:
    match attention:
        case GroupedAttention():
            queries = attention.heads * (1 + attention.output_gate)
            return 3 * hidden + (queries + 2 * attention.key_value_heads) * attention.head_dim
        case LatentAttention():
            queries = attention.heads * (attention.nope_dim + attention.rope_dim)
            down = hidden + attention.key_value_rank + attention.rope_dim
            up = attention.key_value_rank + attention.heads * (attention.nope_dim + attention.value_dim)
            if attention.query_rank is None:
                return down + up + hidden + queries
            return down + up + hidden + attention.query_rank + attention.query_rank + queries
        case LinearAttention():
            keys, values = attention.key_heads * attention.key_dim, attention.value_heads * attention.value_dim
            return hidden + 2 * keys + 2 * values + 2 * attention.value_heads
        case _:
            assert_never(attention)


def _output(attention: Attention) -> int:
    match attention:
        case GroupedAttention():
            return attention.heads * attention.head_dim
        case LatentAttention():
            return attention.heads * attention.value_dim
        case LinearAttention():
            return attention.value_heads * attention.value_dim
        case _:
            assert_never(attention)


def _mlp_widths(hidden: int, mlp: FeedForward, target: LoraTarget) -> int:
    match mlp:
        case DenseMLP():
            intermediate = mlp.intermediate
        case Experts():
            intermediate = mlp.shared_intermediate
        case _:
            assert_never(mlp)
    if intermediate == 0:
        return 0
    if target is LoraTarget.GATE_UP:
        return 2 * (hidden + intermediate)
    return intermediate + hidden if target is LoraTarget.DOWN else 0


def _expert_widths(hidden: int, mlp: FeedForward, target: LoraTarget) -> int:
    if not isinstance(mlp, Experts):
        return 0
    if target is LoraTarget.EXPERT_GATE_UP:
        return mlp.count * 2 * (hidden + mlp.intermediate)
    return mlp.count * (mlp.intermediate + hidden) if target is LoraTarget.EXPERT_DOWN else 0
