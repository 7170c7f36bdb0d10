"""The common parts of the families: heads, windows, which layers hold experts, and the finished model."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from moejob_api.models.reader import MOST_LAYERS, ConfigReader
from moejob_api.models.shape import (
    Attention,
    DenseMLP,
    Experts,
    Family,
    FeedForward,
    GroupedAttention,
    Layer,
    ModelShape,
)

FULL = "full_attention"
SLIDING = "sliding_attention"


def build_shape(
    config: ConfigReader, family: Family, layers: tuple[Layer, ...], mtp: int = 0, *, tied: bool = False
) -> ModelShape:
    """The finished model; `mtp` further layers are like the last one, as in Megatron. `tied` where no key says it."""
    return ModelShape(
        family=family,
        hidden=config.read_size("hidden_size"),
        vocabulary=config.read_size("vocab_size"),
        tied_embeddings=config.read_flag("tie_word_embeddings", absent=tied),
        positions=config.read_size("max_position_embeddings"),
        layers=layers,
        mtp_layers=(layers[-1],) * mtp,
    )


def layer_count(config: ConfigReader) -> int:
    """Return the number of layers of the model."""
    return config.read_size("num_hidden_layers", largest=MOST_LAYERS)


def stack_layers(attentions: Iterable[Attention], mlps: Iterable[FeedForward]) -> tuple[Layer, ...]:
    """The layers, equal ones as one object: counting groups them by identity before it compares."""
    kinds: dict[tuple[int, int], Layer] = {}
    return tuple(
        kinds.setdefault((id(attention), id(mlp)), Layer(attention, mlp))
        for attention, mlp in zip(attentions, mlps, strict=True)
    )


def mtp_count(config: ConfigReader, absent: int = 1) -> int:
    """Return the number of MTP modules; `absent` is what Transformers takes when the file does not say."""
    key = "num_mtp_layers" if "num_nextn_predict_layers" not in config.values else "num_nextn_predict_layers"
    return config.read_size(key, absent=absent, smallest=0, largest=MOST_LAYERS)


def refuse_uneven_heads(config: ConfigReader) -> None:
    """Refuses, as Transformers does for some families, a hidden size that the heads do not divide."""
    hidden, heads = config.read_size("hidden_size"), config.read_size("num_attention_heads")
    if hidden % heads:
        config.refuse_model(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}")


def grouped_attention(
    config: ConfigReader, *, head_dim: int | None = None, key_value_heads: int | None = None
) -> GroupedAttention:
    """Attention with key and value heads in groups, without any of the extras.

    `head_dim` and `key_value_heads` are what missing keys mean. Without the first it is hidden / heads; without the
    second the key is required, for Transformers would put in the number of one certain model.
    """
    heads = config.read_size("num_attention_heads")
    groups = _key_value_heads(config, heads, key_value_heads)
    if heads % groups:
        config.refuse_model(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {groups}")
    return GroupedAttention(heads=heads, key_value_heads=groups, head_dim=_head_dim(config, heads, head_dim))


def _key_value_heads(config: ConfigReader, heads: int, absent: int | None) -> int:
    if config.is_null("num_key_value_heads"):
        return heads
    return config.read_size("num_key_value_heads", absent)


def _head_dim(config: ConfigReader, heads: int, absent: int | None) -> int:
    # Where a family has a head size of its own, Transformers refuses null as it refuses text.
    if absent is not None:
        return config.read_size("head_dim", absent)
    hidden = config.read_size("hidden_size")
    stated = config.read_optional_size("head_dim")
    if stated is None and hidden < heads:
        config.refuse_model(f"hidden_size {hidden} leaves nothing for each of num_attention_heads {heads}")
    return stated or hidden // heads


def dense_mlp(config: ConfigReader) -> DenseMLP:
    """The feed-forward network of a layer without experts."""
    return DenseMLP(config.read_size("intermediate_size"))


def mixed_mlps(config: ConfigReader, experts: Experts, sparse: list[bool]) -> list[FeedForward]:
    """Experts where `sparse` says so, a dense network elsewhere; its size is read only if a layer needs it."""
    if experts.per_token > experts.count:
        config.refuse_model(f"num_experts_per_tok {experts.per_token} is more than the {experts.count} experts")
    if all(sparse):
        return [experts] * len(sparse)
    dense = dense_mlp(config)
    return [experts if is_sparse else dense for is_sparse in sparse]


def expert_layers_by_step(config: ConfigReader) -> list[bool]:
    """Return the layers that hold experts in Qwen's way: every n-th, except those listed as plain."""
    step = config.read_size("decoder_sparse_step", absent=1)
    plain = config.read_indices("mlp_only_layers")
    return [index not in plain and (index + 1) % step == 0 for index in range(layer_count(config))]


def expert_layers_after_dense(config: ConfigReader, absent: int) -> list[bool]:
    """Return the layers that hold experts in DeepSeek's way: all but the first few."""
    config.require_value("moe_layer_freq", 1, "Transformers builds experts in every layer whatever it says")
    dense = config.read_size("first_k_dense_replace", absent=absent, smallest=0)
    return [index >= dense for index in range(layer_count(config))]


def refuse_uneven_groups(
    config: ConfigReader, experts: Experts, *, absent_groups: int | None = None, absent_kept: int | None = None
) -> None:
    """Refuse groups of experts that a token cannot choose from; Transformers would fail at the first token."""
    groups, chosen_groups = config.read_size("n_group", absent_groups), config.read_size("topk_group", absent_kept)
    group_experts, remainder = divmod(experts.count, groups)
    if remainder:
        config.refuse_model(f"n_group {groups} does not divide the {experts.count} experts")
    if chosen_groups > groups:
        config.refuse_model(f"topk_group {chosen_groups} is more than n_group {groups}")
    # Groups of sigmoid scores are compared by the best two of each.
    if experts.selection_bias and group_experts < 2:
        config.refuse_model(f"n_group {groups} leaves one of {experts.count} experts to a group; two are needed")
    if experts.per_token > chosen_groups * group_experts:
        config.refuse_model(
            f"num_experts_per_tok {experts.per_token} is more than the {chosen_groups * group_experts} experts of the "
            f"{chosen_groups} groups that "
            "topk_group keeps"
        )


def optional_window(config: ConfigReader) -> int | None:
    """The sliding window of Qwen's models, where sliding_window counts only when use_sliding_window says so."""
    return window_or_none(config, absent=4096) if config.read_flag("use_sliding_window") else None


def window_or_none(config: ConfigReader, absent: int) -> int | None:
    """The sliding window, `absent` where the key is missing; null switches it off."""
    return None if config.is_null("sliding_window") else config.read_size("sliding_window", absent=absent)


def windowed_attentions(
    config: ConfigReader, full: GroupedAttention, window: int | None, slides: list[bool]
) -> list[GroupedAttention]:
    """The attention of each layer; `slides` says which have the window when the file has no layer_types."""
    kinds = config.read_kinds("layer_types", (FULL, SLIDING), len(slides))
    sliding = replace(full, window=window)
    return [sliding if slide else full for slide in (slides if kinds is None else [k == SLIDING for k in kinds])]
