"""Every parameter of a model by its global name: its whole shape, and over which groups its axes are divided.

Pure arithmetic: no tensors, no process groups. Names hold the global index of a layer, so they mean the same in every
layout.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import chain
from typing import assert_never

from moejob_api.arithmetic import round_up
from moejob_api.layout.ranks import ParallelGroup
from moejob_api.models.shape import (
    Attention,
    DenseMLP,
    Experts,
    FeedForward,
    GroupedAttention,
    LatentAttention,
    Layer,
    LinearAttention,
    ModelShape,
)
from moejob_api.planner.memory.constants import VOCABULARY_MULTIPLE

Slices = tuple[slice, ...]


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter, whole. `divided` names the axes that are cut into equal parts, each with its group.

    may_be_whole: every rank holds all of it where the group's size does not divide the axis (heads of keys and values).
    sections: lengths of the parts of axis 1 (queries, keys and values of a head) that files keep one after another.
    is_buffer: not trained by gradients, and float32 whatever the others are.
    """

    name: str
    shape: tuple[int, ...]
    divided: tuple[tuple[int, ParallelGroup], ...] = ()
    may_be_whole: bool = False
    sections: tuple[int, ...] = ()
    is_buffer: bool = False


@dataclass(frozen=True, slots=True)
class Coordinates:
    """The coordinates of a rank in the groups that divide parameters."""

    tensor_rank: int = 0
    tensor_size: int = 1
    expert_rank: int = 0
    expert_size: int = 1
    expert_tensor_rank: int = 0
    expert_tensor_size: int = 1

    def rank_and_size(self, group: ParallelGroup) -> tuple[int, int]:
        """Rank and size of a group."""
        match group:
            case ParallelGroup.TENSOR:
                return self.tensor_rank, self.tensor_size
            case ParallelGroup.EXPERT:
                return self.expert_rank, self.expert_size
            case ParallelGroup.EXPERT_TENSOR:
                return self.expert_tensor_rank, self.expert_tensor_size
            case _:
                raise ValueError(f"the {group} group divides no parameter")


def padded_vocabulary(shape: ModelShape) -> int:
    """Rows of the embedding; those beyond the vocabulary are zero. No layout changes their number."""
    return round_up(shape.vocabulary, VOCABULARY_MULTIPLE)


def model_parameters(shape: ModelShape) -> tuple[Parameter, ...]:
    """All parameters in the order in which a token meets them."""
    # Initialisation seeds each parameter by its place in this order.
    layers = (layer_parameters(shape, layer, f"layers.{index}") for index, layer in enumerate(shape.layers))
    heads = (_mtp_parameters(shape, layer, f"mtp.{index}") for index, layer in enumerate(shape.mtp_layers))
    return (
        _vocabulary_parameter(shape, "embedding.weight"),
        *chain.from_iterable(layers),
        Parameter("final_norm.weight", (shape.hidden,)),
        *(() if shape.tied_embeddings else (_vocabulary_parameter(shape, "output.weight"),)),
        *chain.from_iterable(heads),
    )


def layer_parameters(shape: ModelShape, layer: Layer, prefix: str) -> tuple[Parameter, ...]:
    """The parameters of one layer, named `prefix`.attention_norm.weight and so on."""
    hidden = shape.hidden
    inside = (
        Parameter("attention_norm.weight", (hidden,)),
        *_attention_parameters(hidden, layer.attention),
        Parameter("mlp_norm.weight", (hidden,)),
        *_feed_forward_parameters(hidden, layer.mlp),
    )
    return tuple(replace(parameter, name=f"{prefix}.{parameter.name}") for parameter in inside)


def divided_axes(parameter: Parameter, place: Coordinates) -> tuple[tuple[int, ParallelGroup], ...]:
    """The axes that are cut in a layout: all that are declared, but for what stays whole there."""
    return tuple(
        (axis, group) for axis, group in parameter.divided if _is_cut(parameter, axis, place.rank_and_size(group)[1])
    )


def local_slices(parameter: Parameter, place: Coordinates) -> Slices:
    """Return the part of a parameter that one rank holds."""
    slices = [slice(0, size) for size in parameter.shape]
    for axis, group in divided_axes(parameter, place):
        rank, size = place.rank_and_size(group)
        part = parameter.shape[axis] // size
        slices[axis] = slice(rank * part, (rank + 1) * part)
    return tuple(slices)


def is_zero_centred(name: str) -> bool:
    """Return whether a model of zero-centred norms keeps this weight as the distance from one."""
    return name.endswith("norm.weight") and not name.endswith("state_norm.weight")


def local_shape(parameter: Parameter, place: Coordinates) -> tuple[int, ...]:
    """The shape of what one rank holds of a parameter."""
    return tuple(part.stop - part.start for part in local_slices(parameter, place))


def _is_cut(parameter: Parameter, axis: int, size: int) -> bool:
    if parameter.shape[axis] % size == 0:
        return size > 1
    if parameter.may_be_whole:
        return False
    raise ValueError(f"{parameter.name}: {size} ranks do not divide axis {axis} of {parameter.shape}")


def _vocabulary_parameter(shape: ModelShape, name: str) -> Parameter:
    return Parameter(name, (padded_vocabulary(shape), shape.hidden), _TENSOR_0)


def _mtp_parameters(shape: ModelShape, layer: Layer, prefix: str) -> Iterator[Parameter]:
    """An MTP module; its projection takes the embedding's half first, then the hidden one."""
    hidden = shape.hidden
    yield Parameter(f"{prefix}.embedding_norm.weight", (hidden,))
    yield Parameter(f"{prefix}.hidden_norm.weight", (hidden,))
    yield Parameter(f"{prefix}.projection.weight", (hidden, 2 * hidden))
    yield from layer_parameters(shape, layer, f"{prefix}.layer")
    yield Parameter(f"{prefix}.final_norm.weight", (hidden,))


def _attention_parameters(hidden: int, attention: Attention) -> Iterator[Parameter]:
    match attention:
        case GroupedAttention():
            return _grouped_attention(hidden, attention)
        case LatentAttention():
            return _latent_attention(hidden, attention)
        case LinearAttention():
            return _linear_attention(hidden, attention)
        case _:
            assert_never(attention)


def _feed_forward_parameters(hidden: int, mlp: FeedForward) -> Iterator[Parameter]:
    match mlp:
        case DenseMLP():
            return _dense_mlp(hidden, mlp)
        case Experts():
            return _expert_parameters(hidden, mlp)
        case _:
            assert_never(mlp)


_TENSOR_0 = ((0, ParallelGroup.TENSOR),)
_TENSOR_1 = ((1, ParallelGroup.TENSOR),)
_EXPERT = (0, ParallelGroup.EXPERT)
_WIDTH = (2, ParallelGroup.EXPERT_TENSOR)


def _grouped_attention(hidden: int, attention: GroupedAttention) -> Iterator[Parameter]:
    heads, groups, dim = attention.heads, attention.key_value_heads, attention.head_dim
    query_dim = dim * (1 + attention.output_gate)
    yield Parameter("attention.query.weight", (heads, query_dim, hidden), _TENSOR_0)
    yield Parameter("attention.key_value.weight", (groups, 2, dim, hidden), _TENSOR_0, may_be_whole=True)
    if attention.qkv_bias:
        yield Parameter("attention.query.bias", (heads, query_dim), _TENSOR_0)
        yield Parameter("attention.key_value.bias", (groups, 2, dim), _TENSOR_0, may_be_whole=True)
    if attention.head_norm:
        yield Parameter("attention.query_norm.weight", (dim,))
        yield Parameter("attention.key_norm.weight", (dim,))
    if attention.joint_norm:
        yield Parameter("attention.query_norm.weight", (heads, dim), _TENSOR_0)
        yield Parameter("attention.key_norm.weight", (groups, dim), _TENSOR_0, may_be_whole=True)
    if attention.sinks:
        yield Parameter("attention.sinks", (heads,), _TENSOR_0)
    yield Parameter("attention.output.weight", (hidden, heads, dim), _TENSOR_1)
    if attention.output_bias:
        yield Parameter("attention.output.bias", (hidden,))


def _latent_attention(hidden: int, attention: LatentAttention) -> Iterator[Parameter]:
    yield from _latent_queries(hidden, attention)
    rank, heads = attention.key_value_rank, attention.heads
    down = rank + attention.rope_dim
    yield Parameter("attention.key_value_down.weight", (down, hidden))
    yield Parameter("attention.key_value_down_norm.weight", (rank,))
    up = attention.nope_dim + attention.value_dim
    yield Parameter("attention.key_value_up.weight", (heads, up, rank), _TENSOR_0)
    yield Parameter("attention.output.weight", (hidden, heads, attention.value_dim), _TENSOR_1)
    if attention.bias:
        yield Parameter("attention.key_value_down.bias", (down,))
        yield Parameter("attention.output.bias", (hidden,))


def _latent_queries(hidden: int, attention: LatentAttention) -> Iterator[Parameter]:
    heads, dim, rank = attention.heads, attention.nope_dim + attention.rope_dim, attention.query_rank
    if rank is None:
        yield Parameter("attention.query.weight", (heads, dim, hidden), _TENSOR_0)
        return
    yield Parameter("attention.query_down.weight", (rank, hidden))
    if attention.bias:
        yield Parameter("attention.query_down.bias", (rank,))
    yield Parameter("attention.query_down_norm.weight", (rank,))
    yield Parameter("attention.query_up.weight", (heads, dim, rank), _TENSOR_0)


def _linear_attention(hidden: int, attention: LinearAttention) -> Iterator[Parameter]:
    key_heads, heads, keys, values = attention.key_heads, attention.value_heads, attention.key_dim, attention.value_dim
    per_key = heads // key_heads
    sections = (keys, keys, per_key * values)
    if attention.separate_gates:
        yield Parameter(
            "attention.state_input.weight", (key_heads, sum(sections), hidden), _TENSOR_0, sections=sections
        )
        yield Parameter("attention.state_gate.weight", (heads, values, hidden), _TENSOR_0)
        yield Parameter("attention.state_strength.weight", (heads, hidden), _TENSOR_0)
        yield Parameter("attention.state_decay.weight", (heads, hidden), _TENSOR_0)
    else:
        yield Parameter("attention.state_input.weight", (key_heads, sum(sections) + sections[-1], hidden), _TENSOR_0)
        yield Parameter("attention.state_rates.weight", (key_heads, 2 * per_key, hidden), _TENSOR_0)
    channels = 2 * key_heads * keys + heads * values
    yield Parameter("attention.convolution", (channels, 1, attention.convolution_width))
    yield Parameter("attention.decay_log", (heads,), _TENSOR_0)
    yield Parameter("attention.decay_bias", (heads,), _TENSOR_0)
    yield Parameter("attention.state_norm.weight", (values,))
    yield Parameter("attention.state_output.weight", (hidden, heads, values), _TENSOR_1)


def _dense_mlp(hidden: int, mlp: DenseMLP) -> Iterator[Parameter]:
    yield from _gated_mlp("mlp", hidden, mlp.intermediate)
    if mlp.bias:
        yield Parameter("mlp.gate_up.bias", (2, mlp.intermediate), _TENSOR_1)
        yield Parameter("mlp.down.bias", (hidden,))


def _gated_mlp(prefix: str, hidden: int, intermediate: int) -> Iterator[Parameter]:
    yield Parameter(f"{prefix}.gate_up.weight", (2, intermediate, hidden), _TENSOR_1)
    yield Parameter(f"{prefix}.down.weight", (hidden, intermediate), _TENSOR_1)


def _expert_parameters(hidden: int, experts: Experts) -> Iterator[Parameter]:
    yield from _router_parameters(hidden, experts)
    count, width = experts.count, experts.intermediate
    yield Parameter("moe.experts.gate_up", (count, 2, width, hidden), (_EXPERT, _WIDTH))
    yield Parameter("moe.experts.down", (count, hidden, width), (_EXPERT, _WIDTH))
    if experts.bias:
        yield Parameter("moe.experts.gate_up_bias", (count, 2, width), (_EXPERT, _WIDTH))
        yield Parameter("moe.experts.down_bias", (count, hidden), (_EXPERT,))
    if experts.shared_intermediate:
        yield from _gated_mlp("moe.shared", hidden, experts.shared_intermediate)
    if experts.shared_gate:
        yield Parameter("moe.shared_gate.weight", (1, hidden))


def _router_parameters(hidden: int, experts: Experts) -> Iterator[Parameter]:
    yield Parameter("moe.router.weight", (experts.count, hidden))
    if experts.router_bias:
        yield Parameter("moe.router.bias", (experts.count,))
    if experts.selection_bias:
        yield Parameter("moe.router.selection_bias", (experts.count,), is_buffer=True)
