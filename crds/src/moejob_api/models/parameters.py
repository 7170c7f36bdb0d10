"""The number of parameters of a model, and the parallel groups over which Megatron divides them. Exact, not estimated.

Knows neither layouts nor bytes: moejob_api.planner.memory does.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from functools import lru_cache
from typing import assert_never

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


@dataclass(frozen=True, slots=True)
class ParameterCounts:
    """Numbers of parameters by how Megatron divides them.

    tensor:     over the tensor group.
    key_value:  projections of keys and values: over the tensor group by Megatron; engines give every rank whole heads.
    replicated: whole on every rank of the tensor group.
    routed:     over expert x expert tensor.
    """

    tensor: int = 0
    key_value: int = 0
    replicated: int = 0
    routed: int = 0

    def __add__(self, other: ParameterCounts) -> ParameterCounts:
        return ParameterCounts(
            self.tensor + other.tensor,
            self.key_value + other.key_value,
            self.replicated + other.replicated,
            self.routed + other.routed,
        )

    def __mul__(self, count: int) -> ParameterCounts:
        return ParameterCounts(
            self.tensor * count, self.key_value * count, self.replicated * count, self.routed * count
        )

    @property
    def total(self) -> int:
        """Parameters of the whole, undivided."""
        return self.tensor + self.key_value + self.replicated + self.routed


def layer_kinds(shape: ModelShape) -> tuple[tuple[Layer, int], ...]:
    """Each kind of layer and how often the model has it, without MTP; a model of any depth has few kinds."""
    # Equal layers are nearly always one object, and an identity is compared faster than a layer is hashed.
    objects = {id(layer): layer for layer in shape.layers}
    kinds: Counter[Layer] = Counter()
    for identity, count in Counter(map(id, shape.layers)).items():
        kinds[objects[identity]] += count
    return tuple(kinds.items())


def layer_weights(shape: ModelShape, layer: Layer) -> ParameterCounts:
    """One layer with its two norms."""
    return _layer_weights(shape.hidden, layer)


def embedding_weights(shape: ModelShape) -> ParameterCounts:
    """The token embedding, not padded to the tensor group."""
    return ParameterCounts(tensor=shape.vocabulary * shape.hidden)


def output_weights(shape: ModelShape) -> ParameterCounts:
    """The output projection; nothing where it is the embedding."""
    return ParameterCounts() if shape.tied_embeddings else embedding_weights(shape)


def final_norm_weights(shape: ModelShape) -> ParameterCounts:
    """The norm before the output projection."""
    return ParameterCounts(replicated=shape.hidden)


def mtp_weights(shape: ModelShape) -> ParameterCounts:
    """The modules that predict further tokens; they use the model's own embedding and output projection."""
    hidden = shape.hidden
    # Norms of the embedding, of the hidden state, and the final one; a projection of the first two side by side.
    beside_the_layer = ParameterCounts(replicated=2 * hidden * hidden + 3 * hidden)
    return sum((layer_weights(shape, layer) + beside_the_layer for layer in shape.mtp_layers), ParameterCounts())


def model_weights(shape: ModelShape) -> ParameterCounts:
    """The whole model without MTP, as Transformers has it: tied weights count once."""
    layers = sum((layer_weights(shape, layer) * count for layer, count in layer_kinds(shape)), ParameterCounts())
    return layers + embedding_weights(shape) + output_weights(shape) + final_norm_weights(shape)


def total_parameters(shape: ModelShape) -> int:
    """Parameters of the model without MTP, as Transformers counts them."""
    return model_weights(shape).total


def mtp_parameters(shape: ModelShape) -> int:
    """Parameters of the modules that predict further tokens."""
    return mtp_weights(shape).total


def active_parameters(shape: ModelShape) -> int:
    """Parameters a token meets: of the routed experts only those it is sent to. Embedding and output are included."""
    return total_parameters(shape) - sum(_idle_parameters(shape, layer) * count for layer, count in layer_kinds(shape))


def active_mtp_parameters(shape: ModelShape) -> int:
    """The same of the modules that predict further tokens, with the output projection once for each of them."""
    projections = len(shape.mtp_layers) * embedding_weights(shape).total
    return mtp_parameters(shape) + projections - sum(_idle_parameters(shape, layer) for layer in shape.mtp_layers)


def _idle_parameters(shape: ModelShape, layer: Layer) -> int:
    if not isinstance(layer.mlp, Experts):
        return 0
    one_expert = layer_weights(shape, layer).routed // layer.mlp.count
    return one_expert * (layer.mlp.count - layer.mlp.per_token)


@lru_cache(maxsize=1024)
def _layer_weights(hidden: int, layer: Layer) -> ParameterCounts:
    norms = ParameterCounts(replicated=2 * hidden)
    return norms + _attention_weights(hidden, layer.attention) + _mlp_weights(hidden, layer.mlp)


def _attention_weights(hidden: int, attention: Attention) -> ParameterCounts:
    match attention:
        case GroupedAttention():
            return _grouped_attention_weights(hidden, attention)
        case LatentAttention():
            return _latent_attention_weights(hidden, attention)
        case LinearAttention():
            return _linear_attention_weights(hidden, attention)
        case _:
            assert_never(attention)


def _mlp_weights(hidden: int, mlp: FeedForward) -> ParameterCounts:
    match mlp:
        case DenseMLP(intermediate, bias):
            return ParameterCounts(
                tensor=_gated_parameters(hidden, intermediate) + bias * 2 * intermediate,
                replicated=bias * hidden,
            )
        case Experts():
            return _expert_weights(hidden, mlp)
        case _:
            assert_never(mlp)


def _gated_parameters(hidden: int, intermediate: int) -> int:
    """Matrices of a gated network: gate, up and down."""
    return 3 * hidden * intermediate


def _grouped_attention_weights(hidden: int, attention: GroupedAttention) -> ParameterCounts:
    width = attention.heads * attention.head_dim
    key_value_width = attention.key_value_heads * attention.head_dim
    # The gate on the output is projected together with the queries, and as wide.
    query_width = width * (1 + attention.output_gate)
    inputs = hidden + attention.qkv_bias
    return ParameterCounts(
        tensor=inputs * query_width + width * (hidden + attention.joint_norm) + attention.sinks * attention.heads,
        key_value=inputs * 2 * key_value_width + attention.joint_norm * key_value_width,
        # Queries and keys have a norm of one head's size each. The output's bias is added after the sum over ranks.
        replicated=attention.head_norm * 2 * attention.head_dim + attention.output_bias * hidden,
    )


def _latent_attention_weights(hidden: int, attention: LatentAttention) -> ParameterCounts:
    query_width = attention.heads * (attention.nope_dim + attention.rope_dim)
    down_width = attention.key_value_rank + attention.rope_dim
    up = attention.key_value_rank * attention.heads * (attention.nope_dim + attention.value_dim)
    output = attention.heads * attention.value_dim * hidden
    inputs = hidden + attention.bias
    shared = ParameterCounts(
        tensor=up + output,
        replicated=inputs * down_width + attention.key_value_rank + attention.bias * hidden,
    )
    rank = attention.query_rank
    if rank is None:
        return shared + ParameterCounts(tensor=hidden * query_width)
    return shared + ParameterCounts(tensor=rank * query_width, replicated=inputs * rank + rank)


def _linear_attention_weights(hidden: int, attention: LinearAttention) -> ParameterCounts:
    keys = attention.key_heads * attention.key_dim
    values = attention.value_heads * attention.value_dim
    # Queries are as wide as keys, the gate as values; decay and update strength are one number a value head each.
    inputs = hidden * (2 * keys + 2 * values + 2 * attention.value_heads)
    # Channels of all queries, then of all keys, then of all values: no cut of them is a cut of heads.
    convolution = attention.convolution_width * (2 * keys + values)
    decay = 2 * attention.value_heads
    return ParameterCounts(tensor=inputs + decay + values * hidden, replicated=convolution + attention.value_dim)


def _expert_weights(hidden: int, experts: Experts) -> ParameterCounts:
    biases = experts.bias * (2 * experts.intermediate + hidden)
    return ParameterCounts(
        tensor=_gated_parameters(hidden, experts.shared_intermediate),
        replicated=experts.count * (hidden + experts.router_bias) + experts.shared_gate * hidden,
        routed=experts.count * (_gated_parameters(hidden, experts.intermediate) + biases),
    )
