"""The shape of a model, as far as planning needs it: layers, heads, experts, vocabulary.

Owns no counting (parameters.py does) and no knowledge of any config.json (families.py does).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum


class Family(StrEnum):
    """Architectures whose config.json is understood, named as Hugging Face's `model_type`."""

    LLAMA = "llama"
    QWEN2 = "qwen2"
    QWEN3 = "qwen3"
    MIXTRAL = "mixtral"
    QWEN2_MOE = "qwen2_moe"
    QWEN3_MOE = "qwen3_moe"
    QWEN3_NEXT = "qwen3_next"
    QWEN3_5_MOE = "qwen3_5_moe_text"
    DEEPSEEK_V2 = "deepseek_v2"
    DEEPSEEK_V3 = "deepseek_v3"
    GLM4_MOE = "glm4_moe"
    GLM4_MOE_LITE = "glm4_moe_lite"
    OLMOE = "olmoe"
    ERNIE4_5_MOE = "ernie4_5_moe"
    MINIMAX_M2 = "minimax_m2"
    GPT_OSS = "gpt_oss"


@dataclass(frozen=True, slots=True)
class GroupedAttention:
    """Softmax attention whose query heads share key and value heads in groups."""

    heads: int
    key_value_heads: int
    head_dim: int
    qkv_bias: bool = False
    output_bias: bool = False
    head_norm: bool = False
    # One norm over all heads of the queries, and one over those of the keys.
    joint_norm: bool = False
    sinks: bool = False
    output_gate: bool = False
    window: int | None = None


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (MLA): keys and values come out of one compressed vector a token."""

    heads: int
    query_rank: int | None
    key_value_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class LinearAttention:
    """Gated delta rule: a state of fixed size instead of keys and values of every token."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    convolution_width: int
    # Matrices of their own for gates, strengths and decays, where others keep those of a key head beside one another.
    separate_gates: bool = False


@dataclass(frozen=True, slots=True)
class DenseMLP:
    """A gated feed-forward network."""

    intermediate: int
    bias: bool = False


@dataclass(frozen=True, slots=True)
class Experts:
    """Routed experts, and a shared one when shared_intermediate is above zero."""

    count: int
    per_token: int
    intermediate: int
    bias: bool = False
    router_bias: bool = False
    shared_intermediate: int = 0
    shared_gate: bool = False
    # A bias for each expert moves the choice of experts, but not their weights; no gradient reaches it.
    selection_bias: bool = False


Attention = GroupedAttention | LatentAttention | LinearAttention
FeedForward = DenseMLP | Experts


@dataclass(frozen=True, slots=True)
class Layer:
    """One transformer layer."""

    attention: Attention
    mlp: FeedForward


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A whole model. `mtp_layers` are the extra layers that predict further tokens (MTP); most models have none."""

    family: Family
    hidden: int
    vocabulary: int
    tied_embeddings: bool
    positions: int
    layers: tuple[Layer, ...]
    mtp_layers: tuple[Layer, ...] = ()
    # Asked for with every size that is considered, for models of a hundred layers: worked out once.
    _attentions: tuple[Attention, ...] = field(init=False, repr=False, compare=False)
    _mlps: tuple[FeedForward, ...] = field(init=False, repr=False, compare=False)
    _experts: Experts | None = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        # Most layers are one object, which is seen faster than that it equals another.
        layers = {id(layer): layer for layer in (*self.layers, *self.mtp_layers)}.values()
        object.__setattr__(self, "_attentions", tuple(dict.fromkeys(layer.attention for layer in layers)))
        object.__setattr__(self, "_mlps", tuple(dict.fromkeys(layer.mlp for layer in layers)))
        routed = (layer.mlp for layer in self.layers if isinstance(layer.mlp, Experts))
        object.__setattr__(self, "_experts", next(routed, None))

    @property
    def experts(self) -> Experts | None:
        """The experts of the first layer that has any; every layer with experts has the same."""
        return self._experts

    @property
    def routed_layers(self) -> tuple[int, ...]:
        """The numbers of the layers that have experts; MTP layers are not among them."""
        return tuple(index for index, layer in enumerate(self.layers) if isinstance(layer.mlp, Experts))

    def attention_kinds(self) -> Iterator[Attention]:
        """Each kind of attention the model has, once."""
        yield from self._attentions

    def mlp_kinds(self) -> Iterator[FeedForward]:
        """Each kind of feed-forward network the model has, once."""
        yield from self._mlps
