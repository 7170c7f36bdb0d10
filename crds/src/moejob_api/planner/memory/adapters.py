"""Parameters of LoRA's adapters: two thin matrices beside each target, one divided like the matrix they sit on."""

from __future__ import annotations

from typing import assert_never

from moejob_api.job.training import Lora, LoraTarget
from moejob_api.models.parameters import ParameterCounts
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


def adapter_weights(hidden: int, layer: Layer, lora: Lora) -> ParameterCounts:
    """All adapters of one layer. Every published matrix has its own: queries, keys, values, gate, up, each expert."""
    beside = (
        _attention_widths(hidden, layer.attention, target) + _mlp_widths(hidden, layer.mlp, target)
        for target in lora.targets
    )
    routed = sum(_expert_widths(hidden, layer.mlp, target) for target in lora.targets)
    return (sum(beside, ParameterCounts()) + ParameterCounts(routed=routed)) * lora.rank


def _attention_widths(hidden: int, attention: Attention, target: LoraTarget) -> ParameterCounts:
    """Inputs and outputs of the attention's matrices that a target names; those that are divided are `tensor`."""
    if target is LoraTarget.QUERY_KEY_VALUE:
        return _query_key_value(hidden, attention)
    if target is LoraTarget.ATTENTION_OUTPUT:
        return ParameterCounts(tensor=_output_width(attention), replicated=hidden)
    return ParameterCounts()


def _query_key_value(hidden: int, attention: Attention) -> ParameterCounts:
    match attention:
        case GroupedAttention():
            queries = attention.heads * (1 + attention.output_gate)
            outputs = (queries + 2 * attention.key_value_heads) * attention.head_dim
            return ParameterCounts(tensor=outputs, replicated=3 * hidden)
        case LatentAttention():
            # What compresses is whole on every tensor rank, on both sides.
            down = hidden + attention.key_value_rank + attention.rope_dim + attention.key_value_rank
            queries = hidden if attention.query_rank is None else hidden + 2 * attention.query_rank
            of_head = 2 * attention.nope_dim + attention.rope_dim + attention.value_dim
            return ParameterCounts(tensor=attention.heads * of_head, replicated=down + queries)
        case LinearAttention():
            keys, values = attention.key_heads * attention.key_dim, attention.value_heads * attention.value_dim
            inputs = hidden * (4 if attention.separate_gates else 2)
            return ParameterCounts(tensor=2 * keys + 2 * values + 2 * attention.value_heads, replicated=inputs)
        case _:
            assert_never(attention)


def _output_width(attention: Attention) -> int:
    match attention:
        case GroupedAttention():
            return attention.heads * attention.head_dim
        case LatentAttention():
            return attention.heads * attention.value_dim
        case LinearAttention():
            return attention.value_heads * attention.value_dim
        case _:
            assert_never(attention)


def _mlp_widths(hidden: int, mlp: FeedForward, target: LoraTarget) -> ParameterCounts:
    match mlp:
        case DenseMLP():
            intermediate = mlp.intermediate
        case Experts():
            intermediate = mlp.shared_intermediate
        case _:
            assert_never(mlp)
    if intermediate == 0:
        return ParameterCounts()
    matrix_widths = ParameterCounts(tensor=intermediate, replicated=hidden)
    match target:
        case LoraTarget.GATE_UP:
            return matrix_widths * 2
        case LoraTarget.DOWN:
            return matrix_widths
        case _:
            return ParameterCounts()


def _expert_widths(hidden: int, mlp: FeedForward, target: LoraTarget) -> int:
    if not isinstance(mlp, Experts):
        return 0
    if target is LoraTarget.EXPERT_GATE_UP:
        return mlp.count * 2 * (hidden + mlp.intermediate)
    return mlp.count * (mlp.intermediate + hidden) if target is LoraTarget.EXPERT_DOWN else 0
