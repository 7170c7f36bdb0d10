"""Seconds of one layer's forward pass for one microbatch on one GPU, by use; the backward pass follows by factors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import assert_never

from moejob_api.arithmetic import ceil_div
from moejob_api.job.moe import DispatcherKind
from moejob_api.layout.expert_nodes import ExpertNodes
from moejob_api.layout.sizes import Layout
from moejob_api.models.shape import (
    DenseMLP,
    Experts,
    GroupedAttention,
    LatentAttention,
    Layer,
    LinearAttention,
)
from moejob_api.planner.cost.rates import (
    DENSE_HOST_SECONDS,
    ELEMENTWISE_PASSES,
    EXCHANGE_SECONDS,
    EXPERTS_HOST_SECONDS,
    LINEAR_ATTENTION_SHARE,
    GpuMachine,
    all_to_all_seconds,
    attention_seconds,
    gather_seconds,
    gemm_seconds,
    grouped_seconds,
)
from moejob_api.planner.memory.kept_activations import FLOAT32_BYTES, LINEAR_CHUNK_TOKENS, kept_by_layer
from moejob_api.planner.memory.microbatch_share import ActivationSettings, MicrobatchShare
from moejob_api.planner.memory.temporaries import projection_width


@dataclass(frozen=True, slots=True)
class LayerWork:
    """The inputs of a layer's time beside its shape.

    keeping: the settings without any recomputation. nodes: the nodes that tokens visit on the way to their experts.
    speed: the speed of products, as a multiple of products in the model's type.
    """

    share: MicrobatchShare
    keeping: ActivationSettings
    machine: GpuMachine
    document_tokens: int
    dispatcher: DispatcherKind
    nodes: ExpertNodes | None
    speed: float


@dataclass(frozen=True, slots=True)
class ForwardTime:
    """Seconds of one forward pass. up: the part of `projections` that expands MLA's compressed vectors."""

    projections: float = 0.0
    up: float = 0.0
    attention: float = 0.0
    feed_forward: float = 0.0
    experts: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0
    dispatch: float = 0.0
    context: float = 0.0

    def add_passes(self, other: ForwardTime, times: int) -> ForwardTime:
        """This pass, and then another one a number of times."""
        return ForwardTime(
            projections=self.projections + other.projections * times,
            up=self.up + other.up * times,
            attention=self.attention + other.attention * times,
            feed_forward=self.feed_forward + other.feed_forward * times,
            experts=self.experts + other.experts * times,
            elementwise=self.elementwise + other.elementwise * times,
            tensor=self.tensor + other.tensor * times,
            dispatch=self.dispatch + other.dispatch * times,
            context=self.context + other.context * times,
        )


# A search asks for the same few thousand again and again.
@lru_cache(maxsize=16_384)
def estimate_forward(layer: Layer, work: LayerWork) -> ForwardTime:
    """The forward pass of one layer."""
    projections, up = _projection_seconds(layer, work)
    feed_forward, experts = _feed_forward_seconds(layer, work)
    touched_bytes = ELEMENTWISE_PASSES * kept_by_layer(layer, work.share, work.keeping).total
    return ForwardTime(
        projections=projections,
        up=up,
        attention=_layer_attention_seconds(layer, work),
        feed_forward=feed_forward,
        experts=experts,
        # A third of what both passes touch.
        elementwise=touched_bytes / 3 / work.machine.hardware.memory_bytes_per_second,
        tensor=_tensor_seconds(layer, work),
        dispatch=_dispatch_seconds(layer, work),
        context=_context_seconds(layer, work),
    )


def _product_seconds(tokens: int, inner: int, outer: int, work: LayerWork) -> float:
    return gemm_seconds(2.0 * tokens * inner * outer, tokens, min(inner, outer), work.machine.hardware) / work.speed


def _projection_seconds(layer: Layer, work: LayerWork) -> tuple[float, float]:
    """All matrices of the attention, and of these the ones that expand compressed vectors."""
    share, attention = work.share, layer.attention
    tokens, hidden = share.tokens, share.hidden
    match attention:
        case GroupedAttention():
            heads = ceil_div(attention.heads, share.tensor)
            groups = max(1, ceil_div(attention.key_value_heads, share.tensor))
            width = (heads * (1 + attention.output_gate) + 2 * groups) * attention.head_dim
            output = _product_seconds(tokens, heads * attention.head_dim, hidden, work)
            return _product_seconds(tokens, hidden, width, work) + output, 0.0
        case LatentAttention():
            return _latent_projection_seconds(attention, work)
        case LinearAttention():
            keys, values = attention.key_heads * attention.key_dim, attention.value_heads * attention.value_dim
            width = ceil_div(2 * keys + 2 * values, share.tensor)
            output = _product_seconds(tokens, ceil_div(values, share.tensor), hidden, work)
            return _product_seconds(tokens, hidden, width, work) + output, 0.0
        case _:
            assert_never(attention)


def _latent_projection_seconds(attention: LatentAttention, work: LayerWork) -> tuple[float, float]:
    share = work.share
    heads = ceil_div(attention.heads, share.tensor)
    queries = heads * (attention.nope_dim + attention.rope_dim)
    rank = attention.query_rank
    up = _product_seconds(share.tokens, rank or share.hidden, queries, work)
    up += _product_seconds(
        share.tokens, attention.key_value_rank, heads * (attention.nope_dim + attention.value_dim), work
    )
    compressed = attention.key_value_rank + attention.rope_dim + (rank or 0)
    down = _product_seconds(share.sequence_tokens, share.hidden, compressed, work)
    return up + down + _product_seconds(share.tokens, heads * attention.value_dim, share.hidden, work), up


def _layer_attention_seconds(layer: Layer, work: LayerWork) -> float:
    """Each token meets half of its document, or its window."""
    share, attention, hardware = work.share, layer.attention, work.machine.hardware
    length = work.document_tokens
    match attention:
        case GroupedAttention():
            heads = ceil_div(attention.heads, share.tensor)
            attended_tokens = length / 2 if attention.window is None else min(length / 2, attention.window)
            return attention_seconds(
                4.0 * share.tokens * heads * attention.head_dim * attended_tokens, length, hardware
            )
        case LatentAttention():
            heads = ceil_div(attention.heads, share.tensor)
            width = attention.nope_dim + attention.rope_dim + attention.value_dim
            return attention_seconds(2.0 * share.tokens * heads * width * length / 2, length, hardware)
        case LinearAttention():
            heads = ceil_div(attention.value_heads, share.tensor)
            inside = LINEAR_CHUNK_TOKENS * (attention.key_dim + attention.value_dim)
            flops = 2.0 * share.tokens * heads * (2 * attention.key_dim * attention.value_dim + inside)
            return flops / (LINEAR_ATTENTION_SHARE * hardware.bf16_flops_per_second)
        case _:
            assert_never(attention)


def _feed_forward_seconds(layer: Layer, work: LayerWork) -> tuple[float, float]:
    """Seconds in dense and shared networks, and in routed experts."""
    mlp = layer.mlp
    match mlp:
        case DenseMLP():
            return _gated_seconds(mlp.intermediate, work), 0.0
        case Experts():
            shared = _gated_seconds(mlp.shared_intermediate, work) if mlp.shared_intermediate else 0.0
            return shared + _router_seconds(mlp, work), _expert_seconds(mlp, work)
        case _:
            assert_never(mlp)


def _gated_seconds(intermediate: int, work: LayerWork) -> float:
    width = ceil_div(intermediate, work.share.tensor)
    return _product_seconds(work.share.tokens, work.share.hidden, 2 * width, work) + _product_seconds(
        work.share.tokens, width, work.share.hidden, work
    )


def _router_seconds(experts: Experts, work: LayerWork) -> float:
    return _product_seconds(work.share.sequence_tokens, work.share.hidden, experts.count, work)


def _expert_seconds(experts: Experts, work: LayerWork) -> float:
    share = work.share
    rows, local_experts = _expert_rows(experts, share), ceil_div(experts.count, share.expert)
    width = ceil_div(experts.intermediate, share.expert_tensor)
    return (
        grouped_seconds(6.0 * rows * share.hidden * width, rows / local_experts, width, work.machine.hardware)
        / work.speed
    )


def rounded_elements(layer: Layer, work: LayerWork) -> float:
    """Elements that both passes of a layer round to FP8: what each matrix multiplies, and what comes back to it."""
    share = work.share
    # Around attention as many as there are numbers in its matrices' rows; twice, for there are two passes.
    attention = 2.0 * share.tokens * (2 * share.hidden + projection_width(layer.attention, share))
    mlp = layer.mlp
    match mlp:
        case DenseMLP():
            return attention + share.tokens * _rounded_row_elements(mlp.intermediate, share.tensor, share)
        case Experts():
            shared = share.tokens * _rounded_row_elements(mlp.shared_intermediate, share.tensor, share)
            routed = _expert_rows(mlp, share) * _rounded_row_elements(mlp.intermediate, share.expert_tensor, share)
            return attention + routed + (shared if mlp.shared_intermediate else 0.0)
        case _:
            assert_never(mlp)


def _rounded_row_elements(intermediate: int, ranks: int, share: MicrobatchShare) -> int:
    """Elements of a row of a gated network: its input and activation, and the gradients of output and halves."""
    return 2 * share.hidden + 3 * ceil_div(intermediate, ranks)


def _expert_rows(experts: Experts, share: MicrobatchShare) -> float:
    """Rows that reach the experts of the fullest GPU."""
    return share.count_rows(experts.per_token) / share.expert_rows * _usual_imbalance(share)


def _usual_imbalance(share: MicrobatchShare) -> float:
    """Rows of the fullest GPU in a usual layer, as a multiple of an even share: memory is kept for the worst layer."""
    # A capacity below that share drops the rows beyond it.
    return min(share.expert_rows, (1 + share.expert_rows) / 2)


def _tensor_seconds(layer: Layer, work: LayerWork) -> float:
    """Gathered before the first matrix and scattered after the last, around attention and around a dense network."""
    share = work.share
    if share.tensor == 1:
        return 0.0
    amount = share.tokens * share.hidden * share.element_bytes
    has_dense = isinstance(layer.mlp, DenseMLP) or layer.mlp.shared_intermediate > 0
    return (4 if has_dense else 2) * gather_seconds(amount, 1, share.tensor, work.machine)


def _dispatch_seconds(layer: Layer, work: LayerWork) -> float:
    """Tokens to their experts and back, and the gathering of rows where several GPUs share an expert."""
    experts, share = layer.mlp, work.share
    if not isinstance(experts, Experts):
        return 0.0
    if work.dispatcher is DispatcherKind.ALL_GATHER:
        # Rows come in once as they are and go back as float32 sums.
        size = share.expert * share.expert_tensor
        amount = share.sequence_tokens * size * share.hidden * (share.element_bytes + FLOAT32_BYTES)
        return gather_seconds(amount, 1, size, work.machine)
    # Ranks that share an expert gather the tokens that came to each of them, and scatter sums of those.
    gathered = _row_bytes(share) * copies_sent(experts.per_token, share.expert) * share.expert_tensor
    shared = gather_seconds(gathered, 1, share.expert_tensor, work.machine)
    return 2 * (_travel_seconds(experts, work) + shared)


def _row_bytes(share: MicrobatchShare) -> float:
    """Bytes of this rank's tokens, or of the tokens that the fullest rank receives in their place."""
    return share.sequence_tokens * _usual_imbalance(share) * share.hidden * share.element_bytes


def _travel_seconds(experts: Experts, work: LayerWork) -> float:
    """Seconds for tokens to travel one way between a rank and the holders of their experts."""
    share, nodes, machine = work.share, work.nodes, work.machine
    bytes_once = _row_bytes(share)
    to_ranks = bytes_once * copies_sent(experts.per_token, share.expert)
    if nodes is None:
        return all_to_all_seconds(to_ranks, share.expert_tensor, share.expert, machine)
    # Inside a node tokens of all nodes are sent on, in the end to as many ranks as without the visit.
    to_nodes = bytes_once * copies_sent(experts.per_token, nodes.nodes)
    across = all_to_all_seconds(to_nodes, nodes.stride * nodes.ranks, nodes.nodes, machine)
    return across + all_to_all_seconds(to_ranks, nodes.stride, nodes.ranks, machine)


def host_seconds(layer: Layer, work: LayerWork) -> float:
    """Return what a layer asks of the host in both passes of a micro batch, and waits for other ranks meanwhile."""
    kernels = EXPERTS_HOST_SECONDS if isinstance(layer.mlp, Experts) else DENSE_HOST_SECONDS
    return kernels + _exchange_count(layer, work) * EXCHANGE_SECONDS


def _exchange_count(layer: Layer, work: LayerWork) -> int:
    """Return how often ranks of a group meet in both passes of a layer."""
    share = work.share
    # Out and back in either pass, counts and choices before; one group after the other where experts are divided too.
    groups = (share.expert > 1) + (share.expert_tensor > 1)
    of_experts = 7 * groups if isinstance(layer.mlp, Experts) else 0
    has_dense = isinstance(layer.mlp, DenseMLP) or layer.mlp.shared_intermediate > 0
    of_tensor = 5 * (1 + has_dense) if share.tensor > 1 else 0
    return of_experts + of_tensor + 2 * (share.context > 1)


def copies_sent(per_token: int, ranks: int) -> float:
    """Copies of a token that leave: one for each rank that holds any of its experts, expected of even choices.

    A rank holds none of k even choices among R ranks with probability (1 - 1/R)^k: 3.6 copies for 8 choices over 4.
    """
    return ranks * (1 - (1 - 1 / ranks) ** per_token)


def copies_over_network(per_token: int, layout: Layout, nodes: ExpertNodes | None) -> float:
    """Copies of a token that leave its node: with 8 choices over two nodes of four ranks 2.6, or 1.0 to nodes first."""
    if nodes is not None:
        return copies_sent(per_token, nodes.nodes) * (nodes.nodes - 1) / nodes.nodes
    ranks_in_node = max(1, min(layout.expert, layout.gpus_per_pod // layout.expert_tensor))
    return copies_sent(per_token, layout.expert) * (layout.expert - ranks_in_node) / layout.expert


def _context_seconds(layer: Layer, work: LayerWork) -> float:
    """Keys and values of the whole sequence."""
    share, attention = work.share, layer.attention
    match attention:
        case GroupedAttention():
            width = 2 * max(1, ceil_div(attention.key_value_heads, share.tensor)) * attention.head_dim
        case LatentAttention():
            heads = ceil_div(attention.heads, share.tensor)
            width = heads * (attention.nope_dim + attention.rope_dim + attention.value_dim)
        case LinearAttention():
            width = 0
        case _:
            assert_never(attention)
    amount = share.tokens * share.context * width * share.element_bytes
    return gather_seconds(amount, share.tensor, share.context, work.machine)
