"""Bytes that one layer keeps for the backward pass of one microbatch, and bytes that come and go while it is computed.

Counted tensor by tensor along the forward pass of Megatron's layer with our modules on plain torch. Flash attention
keeps no matrix of scores; norms, rotary embedding and gated activations keep their inputs and recompute the rest.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, comb
from typing import assert_never

from moejob_api.arithmetic import ceil_div
from moejob_api.job.training import LoraTarget, RecomputeModule
from moejob_api.models.shape import (
    DenseMLP,
    Experts,
    GroupedAttention,
    LatentAttention,
    Layer,
    LinearAttention,
)
from moejob_api.planner.memory.constants import INDEX_BYTES
from moejob_api.planner.memory.microbatch_share import ActivationSettings, MicrobatchShare

FLOAT32_BYTES = 4
# The chunked delta rule keeps one state for each chunk of tokens.
LINEAR_CHUNK_TOKENS = 64


@dataclass(frozen=True, slots=True)
class KeptBytes:
    """Bytes kept for the backward pass: inputs of norms and matrices, attention, feed-forward networks, experts."""

    stream: int = 0
    attention: int = 0
    feed_forward: int = 0
    routed: int = 0
    routing: int = 0

    @property
    def total(self) -> int:
        """All of it."""
        return self.stream + self.attention + self.feed_forward + self.routed + self.routing

    def __add__(self, other: KeptBytes) -> KeptBytes:
        return KeptBytes(
            self.stream + other.stream,
            self.attention + other.attention,
            self.feed_forward + other.feed_forward,
            self.routed + other.routed,
            self.routing + other.routing,
        )

    def __mul__(self, count: int) -> KeptBytes:
        return KeptBytes(
            self.stream * count,
            self.attention * count,
            self.feed_forward * count,
            self.routed * count,
            self.routing * count,
        )


def kept_by_layer(layer: Layer, share: MicrobatchShare, settings: ActivationSettings) -> KeptBytes:
    """Return the bytes that one layer keeps of one microbatch."""
    return KeptBytes(
        stream=_stream_bytes(layer, share, settings),
        attention=_attention_bytes(layer, share, settings),
        feed_forward=_feed_forward_bytes(layer, share, settings),
        routed=_routed_bytes(layer, share, settings),
        routing=_routing_bytes(layer, share, settings),
    )


def layer_input_bytes(share: MicrobatchShare) -> int:
    """Return the bytes of the input, all that a recomputed layer keeps."""
    return share.sequence_tokens * share.hidden * share.element_bytes


def _stream_bytes(layer: Layer, share: MicrobatchShare, settings: ActivationSettings) -> int:
    """The inputs of both norms, and their outputs, which the matrices behind them need."""
    inputs = 2 * layer_input_bytes(share) + share.sequence_tokens * 2 * FLOAT32_BYTES
    if RecomputeModule.NORMS in settings.recomputed:
        return inputs
    # What is computed again as a whole begins with its norm.
    recomputed_block = RecomputeModule.MLP if isinstance(layer.mlp, DenseMLP) else RecomputeModule.EXPERTS
    return inputs + (1 if recomputed_block in settings.recomputed else 2) * layer_input_bytes(share)


# --- attention ------------------------------------------------------------------------------------------------------


def _attention_bytes(layer: Layer, share: MicrobatchShare, settings: ActivationSettings) -> int:
    match layer.attention:
        case GroupedAttention():
            bytes_of_token = _grouped_token_bytes(layer.attention, share, settings)
        case LatentAttention():
            bytes_of_token = _latent_token_bytes(layer.attention, share, settings)
        case LinearAttention():
            bytes_of_token = _linear_token_bytes(layer.attention, share)
        case _:
            assert_never(layer.attention)
    adapters = settings.adapter_rank * share.element_bytes * len(ATTENTION_TARGETS & settings.inputs)
    return share.tokens * (bytes_of_token + adapters)


ATTENTION_TARGETS = frozenset({LoraTarget.QUERY_KEY_VALUE, LoraTarget.ATTENTION_OUTPUT})


def _grouped_token_bytes(attention: GroupedAttention, share: MicrobatchShare, settings: ActivationSettings) -> int:
    heads, groups = ceil_div(attention.heads, share.tensor), max(1, ceil_div(attention.key_value_heads, share.tensor))
    # Values are a view of what keys and values are projected to, so all of it stays. Queries and keys are kept rotated;
    # what queries are projected to, only where a norm reads it or a gate is part of it.
    is_normed = attention.head_norm or attention.joint_norm
    projected = heads * (1 + attention.output_gate) if is_normed or attention.output_gate else 0
    wide = projected + 2 * groups + heads + groups
    # The attention's output is the input of the output projection. A gate adds its sigmoid and the gated product.
    wide += heads * (3 if attention.output_gate else 1)
    statistics = FLOAT32_BYTES * ((heads + groups) * attention.head_norm + 2 * attention.joint_norm)
    if RecomputeModule.CORE_ATTENTION not in settings.recomputed:
        statistics += FLOAT32_BYTES * heads
        wide += _gathered_width(2 * groups, share)
    return wide * attention.head_dim * share.element_bytes + statistics


def _latent_token_bytes(attention: LatentAttention, share: MicrobatchShare, settings: ActivationSettings) -> int:
    heads = ceil_div(attention.heads, share.tensor)
    key_width = attention.nope_dim + attention.rope_dim
    # Both compressed vectors before and after their norms.
    compressed = 2 * (attention.query_rank or 0) + 2 * attention.key_value_rank + attention.rope_dim
    wide = heads * attention.value_dim
    if RecomputeModule.LATENT_UP_PROJECTION not in settings.recomputed:
        # Queries and keys, and beside them what keys and values are expanded to: values are a view of it.
        wide += heads * (2 * key_width + attention.nope_dim + attention.value_dim)
    elif attention.query_rank is None:
        wide += heads * key_width
    statistics = 0
    if RecomputeModule.CORE_ATTENTION not in settings.recomputed:
        statistics = FLOAT32_BYTES * heads
        wide += _gathered_width(heads * (key_width + attention.value_dim), share)
    return (ceil_div(compressed, share.sequence) + wide) * share.element_bytes + statistics


def _linear_token_bytes(attention: LinearAttention, share: MicrobatchShare) -> int:
    keys = attention.key_heads * attention.key_dim // share.tensor
    values = attention.value_heads * attention.value_dim // share.tensor
    heads = attention.value_heads // share.tensor
    # All between the projections is computed again.
    return (2 * keys + 2 * values + 2 * heads + values) * share.element_bytes


def _gathered_width(width: int, share: MicrobatchShare) -> int:
    """Keys and values of the whole sequence, which context ranks gather from each other."""
    return width * share.context if share.context > 1 else 0


# --- feed-forward ---------------------------------------------------------------------------------------------------


def _feed_forward_bytes(layer: Layer, share: MicrobatchShare, settings: ActivationSettings) -> int:
    match layer.mlp:
        case DenseMLP():
            if RecomputeModule.MLP in settings.recomputed:
                return 0
            return _gated_bytes(layer.mlp.intermediate, share, settings)
        case Experts():
            if layer.mlp.shared_intermediate == 0 or RecomputeModule.EXPERTS in settings.recomputed:
                return 0
            # The gate multiplies the shared expert's output, which stays for it.
            gate = layer.mlp.shared_gate * share.sequence_tokens * share.hidden * share.element_bytes
            if RecomputeModule.SHARED_EXPERTS in settings.recomputed:
                return gate
            return gate + _gated_bytes(layer.mlp.shared_intermediate, share, settings)
        case _:
            assert_never(layer.mlp)


FEED_FORWARD_TARGETS = frozenset({LoraTarget.GATE_UP, LoraTarget.DOWN})
EXPERT_TARGETS = frozenset({LoraTarget.EXPERT_GATE_UP, LoraTarget.EXPERT_DOWN})


def _gated_bytes(intermediate: int, share: MicrobatchShare, settings: ActivationSettings) -> int:
    """Gate and up, which the activation needs, and the activation, which the down projection needs to be trained."""
    width = ceil_div(intermediate, share.tensor) * (3 if LoraTarget.DOWN in settings.inputs else 2)
    adapters = settings.adapter_rank * len(FEED_FORWARD_TARGETS & settings.inputs)
    return share.tokens * (width + adapters) * share.element_bytes


def _routed_bytes(layer: Layer, share: MicrobatchShare, settings: ActivationSettings) -> int:
    if not isinstance(layer.mlp, Experts) or RecomputeModule.EXPERTS in settings.recomputed:
        return 0
    intermediate = ceil_div(layer.mlp.intermediate, share.expert_tensor)
    width = 2 * intermediate + settings.adapter_rank * len(EXPERT_TARGETS & settings.inputs)
    needs_input, arrived = LoraTarget.EXPERT_GATE_UP in settings.inputs, 0
    if RecomputeModule.EXPERT_INPUT in settings.recomputed:
        arrived = _arrived_tokens(layer.mlp, share, settings) * share.hidden
    elif needs_input:
        width += share.hidden
    if LoraTarget.EXPERT_DOWN in settings.inputs and RecomputeModule.EXPERT_ACTIVATION not in settings.recomputed:
        width += intermediate
    # Rows are put in the order of experts when they leave, and once more where they arrive from other GPUs.
    indices = INDEX_BYTES * (2 if share.expert * share.expert_tensor == 1 else 4)
    rows = share.count_rows(layer.mlp.per_token) * (width * share.element_bytes + FLOAT32_BYTES + indices)
    return rows + arrived * share.element_bytes


def _arrived_tokens(experts: Experts, share: MicrobatchShare, settings: ActivationSettings) -> int:
    """Tokens that other ranks sent here: their rows are made again, beside the tokens that the router keeps.

    A token is sent once to each rank that holds any of its experts. With 8 of 128 experts chosen, 16 on each of eight
    ranks, a rank holds none of them with probability C(112, 8) / C(128, 8) = 0.33: 5.3 ranks get a copy.
    """
    if share.expert * share.expert_tensor == 1:
        return 0
    if settings.gathers:
        return share.sequence_tokens * share.expert * share.expert_tensor
    elsewhere = experts.count - ceil_div(experts.count, share.expert)
    ranks = share.expert * (1 - comb(elsewhere, experts.per_token) / comb(experts.count, experts.per_token))
    return ceil(share.count_rows(1) * ranks)


def _routing_bytes(layer: Layer, share: MicrobatchShare, settings: ActivationSettings) -> int:
    """Scores of every expert for the balancing loss, probabilities and the map of choices; the choices themselves."""
    if not isinstance(layer.mlp, Experts) or RecomputeModule.EXPERTS in settings.recomputed:
        return 0
    of_every_expert = FLOAT32_BYTES + settings.router_bytes + 1
    of_every_choice = 4 * INDEX_BYTES + 2 * FLOAT32_BYTES
    return share.sequence_tokens * (layer.mlp.count * of_every_expert + layer.mlp.per_token * of_every_choice)
