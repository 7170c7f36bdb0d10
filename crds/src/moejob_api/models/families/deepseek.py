"""Families of experts behind latent attention: DeepSeek-V2, DeepSeek-V3, GLM-4.7-Flash and models built alike."""

from __future__ import annotations

from moejob_api.models.families.layers import (
    build_shape,
    expert_layers_after_dense,
    layer_count,
    mixed_mlps,
    mtp_count,
    refuse_uneven_groups,
    refuse_uneven_heads,
    stack_layers,
)
from moejob_api.models.families.mixture_of_experts import shared_experts
from moejob_api.models.reader import ConfigReader
from moejob_api.models.shape import Family, LatentAttention, ModelShape


def deepseek_v2_shape(config: ConfigReader) -> ModelShape:
    """DeepSeek-V2 and its Lite model."""
    refuse_uneven_heads(config)
    config.require_value("mlp_bias", False, "Megatron's layers for this family have no such bias")
    experts = shared_experts(config, absent=2, sigmoid=False)
    if config.values.get("topk_method") == "group_limited_greedy":
        refuse_uneven_groups(config, experts)
    mlps = mixed_mlps(config, experts, expert_layers_after_dense(config, absent=0))
    return build_shape(config, Family.DEEPSEEK_V2, stack_layers([_latent_attention(config)] * len(mlps), mlps))


def deepseek_v3_shape(config: ConfigReader) -> ModelShape:
    """DeepSeek-V3, R1 and Moonlight."""
    experts = shared_experts(config, absent=1, sigmoid=True)
    refuse_uneven_groups(config, experts, absent_groups=8, absent_kept=4)
    mlps = mixed_mlps(config, experts, expert_layers_after_dense(config, absent=3))
    layers = stack_layers([_latent_attention(config)] * layer_count(config), mlps)
    return build_shape(config, Family.DEEPSEEK_V3, layers, mtp_count(config))


def glm4_moe_lite_shape(config: ConfigReader) -> ModelShape:
    """GLM-4.7-Flash: DeepSeek-V3 with the experts of GLM-4.5, and a list of the layers that hold them."""
    experts = shared_experts(config, absent=1, sigmoid=True)
    refuse_uneven_groups(config, experts, absent_groups=1, absent_kept=1)
    # Transformers reads head_dim of this family as another name for qk_rope_head_dim.
    config.require_value("head_dim", config.read_size("qk_rope_head_dim"), "qk_rope_head_dim says it; remove head_dim")
    for key in ("qk_nope_head_dim", "v_head_dim"):
        # Transformers would put in the sizes of one certain model.
        config.read_size(key)
    attention = _latent_attention(config, absent_query_rank=768)
    mlps = mixed_mlps(config, experts, _listed_expert_layers(config))
    return build_shape(
        config, Family.GLM4_MOE_LITE, stack_layers([attention] * len(mlps), mlps), mtp_count(config, absent=0)
    )


def _listed_expert_layers(config: ConfigReader) -> list[bool]:
    count = layer_count(config)
    kinds = config.read_kinds("mlp_layer_types", ("dense", "sparse"), count) or ("dense", *["sparse"] * (count - 1))
    dense = kinds.count("dense")
    if "dense" in kinds[dense:]:
        config.refuse_model("mlp_layer_types has a dense layer behind a sparse one, which engines do not serve")
    # Engines read this key, Transformers the list.
    config.require_value("first_k_dense_replace", dense, "mlp_layer_types says it; Transformers takes 1 without a list")
    return [index >= dense for index in range(count)]


def _latent_attention(config: ConfigReader, absent_query_rank: int = 1536) -> LatentAttention:
    heads, groups = config.read_size("num_attention_heads"), config.read_optional_size("num_key_value_heads")
    if groups not in (None, heads):
        config.refuse_model(
            f"num_key_value_heads {groups} is not num_attention_heads {heads}; heads of latent attention share none"
        )
    # null switches the compression of queries off; only a missing key has a default.
    query_rank = None if config.is_null("q_lora_rank") else config.read_size("q_lora_rank", absent=absent_query_rank)
    return LatentAttention(
        heads=heads,
        query_rank=query_rank,
        key_value_rank=config.read_size("kv_lora_rank", absent=512),
        nope_dim=config.read_size("qk_nope_head_dim", absent=128),
        rope_dim=config.read_size("qk_rope_head_dim", absent=64),
        value_dim=config.read_size("v_head_dim", absent=128),
        bias=config.read_flag("attention_bias"),
    )
