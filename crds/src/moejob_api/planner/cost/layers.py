"""Seconds of one layer for one microbatch on one GPU: forward pass, by what is done; the rest follows by factors."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import assert_never

from moejob_api.arithmetic import ceil_div
from moejob_api.job.moe import Dispatcher
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
    Machine,
    all_to_all_seconds,
    attention_seconds,
    gather_seconds,
    gemm_seconds,
    grouped_seconds,
)
from moejob_api.planner.memory.kept_activations import FLOAT32_BYTES, LINEAR_CHUNK_TOKENS, kept
from moejob_api.planner.memory.microbatch_share import Keeping, Share
from moejob_api.planner.memory.temporaries import projection_width


@dataclass(frozen=True, slots=True)
class Work:
    """The inputs of a layer's time beside its shape.

    keeping: without any recomputation. nodes: those that tokens visit on the way to their experts. speed: of products,
    as a multiple of those in the model's type.
    """

    share: Share
    keeping: Keeping
    machine: Machine
    document_tokens: int
    dispatcher: Dispatcher
    nodes: ExpertNodes | None
    speed: float


@dataclass(frozen=True, slots=True)
class Forward:
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

    def plus(self, other: Forward, times: int) -> Forward:
        """This pass, and then another one a number of times."""
        return Forward(
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
def forward(layer: Layer, work: Work) -> Forward:
    """The forward pass of one layer."""
    projections, up = _projections(layer, work)
    feed_forward, experts = _feed_forward(layer, work)
    touched = ELEMENTWISE_PASSES * kept(layer, work.share, work.keeping).total
    return Forward(
        projections=projections,
        up=up,
        attention=_attention(layer, work),
        feed_forward=feed_forward,
        experts=experts,
        # A third of what both passes touch.
        elementwise=touched / 3 / work.machine.hardware.memory_bytes_per_second,
        tensor=_tensor(layer, work),
        dispatch=_dispatch(layer, work),
        context=_context(layer, work),
    )


def _product(tokens: int, inner: int, outer: int, work: Work) -> float:
    return gemm_seconds(2.0 * tokens * inner * outer, tokens, min(inner, outer), work.machine.hardware) / work.speed


def _projections(layer: Layer, work: Work) -> tuple[float, float]:
    """All matrices of the attention, and of these the ones that expand compressed vectors."""
    share, attention = work.share, layer.attention
    tokens, hidden = share.tokens, share.hidden
    match attention:
        case GroupedAttention():
            heads = ceil_div(attention.heads, share.tensor)
            groups = max(1, ceil_div(attention.key_value_heads, share.tensor))
            width = (heads * (1 + attention.output_gate) + 2 * groups) * attention.head_dim
            output = _product(tokens, heads * attention.head_dim, hidden, work)
            return _product(tokens, hidden, width, work) + output, 0.0
        case LatentAttention():
            return _latent_projections(attention, work)
        case LinearAttention():
            keys, values = attention.key_heads * attention.key_dim, attention.value_heads * attention.value_dim
            width = ceil_div(2 * keys + 2 * values, share.tensor)
            output = _product(tokens, ceil_div(values, share.tensor), hidden, work)
            return _product(tokens, hidden, width, work) + output, 0.0
        case _:
            assert_never(attention)


def _latent_projections(attention: LatentAttention, work: Work) -> tuple[float, float]:
    share = work.share
    heads = ceil_div(attention.heads, share.tensor)
    queries = heads * (attention.nope_dim + attention.rope_dim)
    rank = attention.query_rank
    up = _product(share.tokens, rank or share.hidden, queries, work)
    up += _product(share.tokens, attention.key_value_rank, heads * (attention.nope_dim + attention.value_dim), work)
    compressed = attention.key_value_rank + attention.rope_dim + (rank or 0)
    down = _product(share.sequence_tokens, share.hidden, compressed, work)
    return up + down + _product(share.tokens, heads * attention.value_dim, share.hidden, work), up


def _attention(layer: Layer, work: Work) -> float:
    """Each token meets half of its document, or its window."""
    share, attention, hardware = work.share, layer.attention, work.machine.hardware
    length = work.document_tokens
    match attention:
        case GroupedAttention():
            heads = ceil_div(attention.heads, share.tensor)
            seen = length / 2 if attention.window is None else min(length / 2, attention.window)
            return attention_seconds(4.0 * share.tokens * heads * attention.head_dim * seen, length, hardware)
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


def _feed_forward(layer: Layer, work: Work) -> tuple[float, float]:
    """Seconds in dense and shared networks, and in routed experts."""
    mlp = layer.mlp
    match mlp:
        case DenseMLP():
            return _gated(mlp.intermediate, work), 0.0
        case Experts():
            shared = _gated(mlp.shared_intermediate, work) if mlp.shared_intermediate else 0.0
            return shared + _router(mlp, work), _experts(mlp, work)
        case _:
            assert_never(mlp)


def _gated(intermediate: int, work: Work) -> float:
    width = ceil_div(intermediate, work.share.tensor)
    return _product(work.share.tokens, work.share.hidden, 2 * width, work) + _product(
        work.share.tokens, width, work.share.hidden, work
    )


def _router(experts: Experts, work: Work) -> float:
    return _product(work.share.sequence_tokens, work.share.hidden, experts.count, work)


def _experts(experts: Experts, work: Work) -> float:
    share = work.share
    rows, here = _rows(experts, share), ceil_div(experts.count, share.expert)
    width = ceil_div(experts.intermediate, share.expert_tensor)
    return grouped_seconds(6.0 * rows * share.hidden * width, rows / here, width, work.machine.hardware) / work.speed


def rounded_elements(layer: Layer, work: Work) -> float:
    """Elements that both passes of a layer round to FP8: what each matrix multiplies, and what comes back to it."""
    share = work.share
    # Around attention as many as there are numbers in its matrices' rows; twice, for there are two passes.
    attention = 2.0 * share.tokens * (2 * share.hidden + projection_width(layer.attention, share))
    mlp = layer.mlp
    match mlp:
        case DenseMLP():
            return attention + share.tokens * _rounded_around(mlp.intermediate, share.tensor, share)
        case Experts():
            shared = share.tokens * _rounded_around(mlp.shared_intermediate, share.tensor, share)
            routed = _rows(mlp, share) * _rounded_around(mlp.intermediate, share.expert_tensor, share)
            return attention + routed + (shared if mlp.shared_intermediate else 0.0)
        case _:
            assert_never(mlp)


def _rounded_around(intermediate: int, ranks: int, share: Share) -> int:
    """Elements of a row of a gated network: its input and activation, and the gradients of output and halves."""
    return 2 * share.hidden + 3 * ceil_div(intermediate, ranks)


def _rows(experts: Experts, share: Share) -> float:
    """Rows that reach the experts of the fullest GPU."""
    return share.rows(experts.per_token) / share.expert_rows * _usual_rows(share)


def _usual_rows(share: Share) -> float:
    """Rows of the fullest GPU of a layer like most, as a multiple of an even share: memory is kept for the worst."""
    # What is beyond a capacity below that share is dropped.
    return min(share.expert_rows, (1 + share.expert_rows) / 2)


def _tensor(layer: Layer, work: Work) -> float:
    """Gathered before the first matrix and scattered after the last, around attention and around a dense network."""
    share = work.share
    if share.tensor == 1:
        return 0.0
    amount = share.tokens * share.hidden * share.element_bytes
    has_dense = isinstance(layer.mlp, DenseMLP) or layer.mlp.shared_intermediate > 0
    return (4 if has_dense else 2) * gather_seconds(amount, 1, share.tensor, work.machine)


def _dispatch(layer: Layer, work: Work) -> float:
    """Tokens to their experts and back, and the gathering of rows where several GPUs share an expert."""
    experts, share = layer.mlp, work.share
    if not isinstance(experts, Experts):
        return 0.0
    if work.dispatcher is Dispatcher.ALL_GATHER:
        # Rows come in once as they are and go back as float32 sums.
        size = share.expert * share.expert_tensor
        amount = share.sequence_tokens * size * share.hidden * (share.element_bytes + FLOAT32_BYTES)
        return gather_seconds(amount, 1, size, work.machine)
    # Ranks that share an expert gather the tokens that came to each of them, and scatter sums of those.
    gathered = _one_row_each(share) * copies_sent(experts.per_token, share.expert) * share.expert_tensor
    shared = gather_seconds(gathered, 1, share.expert_tensor, work.machine)
    return 2 * (_moved(experts, work) + shared)


def _one_row_each(share: Share) -> float:
    """Bytes of this rank's tokens, or of those that reach the fullest one in their place."""
    return share.sequence_tokens * _usual_rows(share) * share.hidden * share.element_bytes


def _moved(experts: Experts, work: Work) -> float:
    """Tokens one way between a rank and those that hold their experts."""
    share, nodes, machine = work.share, work.nodes, work.machine
    once = _one_row_each(share)
    to_ranks = once * copies_sent(experts.per_token, share.expert)
    if nodes is None:
        return all_to_all_seconds(to_ranks, share.expert_tensor, share.expert, machine)
    # Inside a node tokens of all nodes are sent on, in the end to as many ranks as without the visit.
    to_nodes = once * copies_sent(experts.per_token, nodes.nodes)
    across = all_to_all_seconds(to_nodes, nodes.stride * nodes.ranks, nodes.nodes, machine)
    return across + all_to_all_seconds(to_ranks, nodes.stride, nodes.ranks, machine)


def host_seconds(layer: Layer, work: Work) -> float:
    """Return what a layer asks of the host in both passes of a micro batch, and waits for other ranks meanwhile."""
    kernels = EXPERTS_HOST_SECONDS if isinstance(layer.mlp, Experts) else DENSE_HOST_SECONDS
    return kernels + _exchanges(layer, work) * EXCHANGE_SECONDS


def _exchanges(layer: Layer, work: Work) -> int:
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
    here = max(1, min(layout.expert, layout.gpus_per_pod // layout.expert_tensor))
    return copies_sent(per_token, layout.expert) * (layout.expert - here) / layout.expert


def _context(layer: Layer, work: Work) -> float:
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
