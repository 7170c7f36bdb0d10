"""Bytes that come and go while one layer is computed: gradients of activations, copies for exchanges, and the newest
gradient of a matrix. Knows one layer at a time.
"""

from __future__ import annotations

from typing import assert_never

from moejob_api.arithmetic import ceil_div
from moejob_api.models.shape import (
    Attention,
    DenseMLP,
    Experts,
    GroupedAttention,
    LatentAttention,
    Layer,
    LinearAttention,
)
from moejob_api.planner.memory.kept_activations import FLOAT32_BYTES, LINEAR_CHUNK_TOKENS
from moejob_api.planner.memory.microbatch_share import ActivationSettings, MicrobatchShare


def working_bytes(layer: Layer, share: MicrobatchShare, settings: ActivationSettings) -> int:
    """Peak bytes of the backward pass of one layer, without the activations that the forward pass kept."""
    gradients = 3 * share.sequence_tokens * share.hidden * share.element_bytes
    if share.sequence > 1:
        # The input of a matrix is gathered again for its gradient; the gradient of the input is whole, then scattered.
        gradients += 2 * share.tokens * share.hidden * share.element_bytes
    if settings.float8:
        gradients += rounded_row_bytes(layer, share)
    busiest = max(_attention_bytes(layer.attention, share), _feed_forward_bytes(layer, share, settings))
    return gradients + busiest + (0 if settings.adapter_rank else _new_gradient_bytes(layer, share, settings))


def rounded_row_bytes(layer: Layer, share: MicrobatchShare) -> int:
    """Bytes of the widest FP8 rows that a product multiplies, a byte an element."""
    of_attention = share.tokens * max(share.hidden, projection_width(layer.attention, share))
    match layer.mlp:
        case DenseMLP():
            return max(of_attention, share.tokens * 2 * ceil_div(layer.mlp.intermediate, share.tensor))
        case Experts():
            inner = 2 * ceil_div(layer.mlp.intermediate, share.expert_tensor)
            return max(of_attention, share.count_rows(layer.mlp.per_token) * max(share.hidden, inner))
        case _:
            assert_never(layer.mlp)


def _new_gradient_bytes(layer: Layer, share: MicrobatchShare, settings: ActivationSettings) -> int:
    """Weight gradients before they are added into their buffer, with the transposed copies that the products make."""
    if not isinstance(layer.mlp, Experts):
        return 2 * largest_matrix(layer, share) * share.element_bytes
    columns = ceil_div(layer.mlp.intermediate, share.expert_tensor)
    matrix = share.hidden * columns * ceil_div(layer.mlp.count, share.expert)
    if settings.sums_in_products:
        # Autograd is given a gradient without numbers, of the larger tensor.
        return max(2 * matrix, 2 * _beside_experts(layer, layer.mlp, share)) * share.element_bytes
    # The second matrix of all experts is not yet added when the first is computed.
    return 2 * max(3 * matrix, largest_matrix(layer, share)) * share.element_bytes


def largest_matrix(layer: Layer, share: MicrobatchShare) -> int:
    """Elements of the largest tensor of parameters on one GPU; the experts of a GPU are one tensor."""
    match layer.mlp:
        case DenseMLP():
            inner = 2 * ceil_div(layer.mlp.intermediate, share.tensor)
            return share.hidden * max(inner, projection_width(layer.attention, share))
        case Experts():
            of_expert = 2 * ceil_div(layer.mlp.intermediate, share.expert_tensor)
            experts = share.hidden * ceil_div(layer.mlp.count, share.expert) * of_expert
            return max(experts, _beside_experts(layer, layer.mlp, share))
        case _:
            assert_never(layer.mlp)


def _beside_experts(layer: Layer, experts: Experts, share: MicrobatchShare) -> int:
    """Elements of the largest other matrix of a layer with experts."""
    shared = 2 * experts.shared_intermediate // share.tensor
    return share.hidden * max(shared, projection_width(layer.attention, share))


def projection_width(attention: Attention, share: MicrobatchShare) -> int:
    """Elements of a token behind the matrices that attention begins with, on one GPU."""
    match attention:
        case GroupedAttention():
            groups = max(1, ceil_div(attention.key_value_heads, share.tensor))
            return (
                ceil_div(attention.heads, share.tensor) * (1 + attention.output_gate) + 2 * groups
            ) * attention.head_dim
        case LatentAttention():
            return ceil_div(attention.heads, share.tensor) * (attention.nope_dim + attention.rope_dim)
        case LinearAttention():
            keys, values = attention.key_heads * attention.key_dim, attention.value_heads * attention.value_dim
            return ceil_div(2 * keys + 2 * values, share.tensor)
        case _:
            assert_never(attention)


def _attention_bytes(attention: Attention, share: MicrobatchShare) -> int:
    """Gradients of queries, keys and values, before and after rotation, and of the output."""
    match attention:
        case GroupedAttention():
            heads = ceil_div(attention.heads, share.tensor)
            groups = max(1, ceil_div(attention.key_value_heads, share.tensor))
            width = (2 * (heads + 2 * groups) + heads) * attention.head_dim
        case LatentAttention():
            of_head = 2 * (2 * (attention.nope_dim + attention.rope_dim) + attention.value_dim) + attention.value_dim
            width = ceil_div(attention.heads, share.tensor) * of_head
        case LinearAttention():
            return share.tokens * _delta_rule_token_bytes(attention, share)
        case _:
            assert_never(attention)
    return share.tokens * width * share.element_bytes


def _delta_rule_token_bytes(attention: LinearAttention, share: MicrobatchShare) -> int:
    """Return the bytes that the rule, in operations of torch, makes of a token in both passes."""
    keys, values, chunk = attention.key_dim, attention.value_dim, LINEAR_CHUNK_TOKENS
    # Chunks of queries, keys and values, several products among a chunk's tokens, and the state at each chunk's start.
    numbers = 9 * keys + 9 * values + 7 * chunk + 2 * keys * values // chunk
    heads = attention.value_heads // share.tensor
    return FLOAT32_BYTES * heads * numbers + 2 * projection_width(attention, share) * share.element_bytes


def _feed_forward_bytes(layer: Layer, share: MicrobatchShare, settings: ActivationSettings) -> int:
    match layer.mlp:
        case DenseMLP():
            return share.tokens * 3 * ceil_div(layer.mlp.intermediate, share.tensor) * share.element_bytes
        case Experts():
            shared = share.tokens * 3 * ceil_div(layer.mlp.shared_intermediate, share.tensor) * share.element_bytes
            return max(shared, _expert_bytes(layer.mlp, share, settings))
        case _:
            assert_never(layer.mlp)


def _expert_bytes(experts: Experts, share: MicrobatchShare, settings: ActivationSettings) -> int:
    """Gradients of every row before and behind the first matrix, or a row and its copy while it is moved."""
    inner = 2 * ceil_div(experts.intermediate, share.expert_tensor)
    rows = share.count_rows(experts.per_token)
    moved = rows * (share.hidden + max(inner, share.hidden)) * share.element_bytes
    if share.expert_tensor == 1 and not settings.gathers:
        return moved
    # Sums over ranks are formed in float32, the type of the probabilities.
    summed = rows * share.hidden * FLOAT32_BYTES
    if not settings.gathers:
        return moved + summed
    all_rows = share.sequence_tokens * share.expert * share.expert_tensor * share.hidden
    return moved + all_rows * (share.element_bytes + FLOAT32_BYTES)
