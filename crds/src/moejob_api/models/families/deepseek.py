"""Families of experts behind latent attention: DeepSeek-V2, DeepSeek-V3 and what is built like it."""

from __future__ import annotations

from moejob_api.models.families.layers import (
    heads_divide_hidden,
    layer_count,
    mixed,
    model,
    mtp_count,
    refuse_uneven_groups,
    sparse_after,
    stacked,
)
from moejob_api.models.families.mixture_of_experts import shared_experts
from moejob_api.models.reader import ConfigReader
from moejob_api.models.shape import Family, LatentAttention, ModelShape


def deepseek_v2(config: ConfigReader) -> ModelShape:
    """DeepSeek-V2 and its Lite model."""
    heads_divide_hidden(config)
    config.only("mlp_bias", False, "Megatron's layers for this family have no such bias")
    experts = shared_experts(config, absent=2, sigmoid=False)
    if config.values.get("topk_method") == "group_limited_greedy":
        refuse_uneven_groups(config, experts)
    mlps = mixed(config, experts, sparse_after(config, absent=0))
    return model(config, Family.DEEPSEEK_V2, stacked([_latent_attention(config)] * len(mlps), mlps))


def deepseek_v3(config: ConfigReader) -> ModelShape:
    """DeepSeek-V3, R1 and Moonlight."""
    experts = shared_experts(config, absent=1, sigmoid=True)
    refuse_uneven_groups(config, experts, absent_groups=8, absent_kept=4)
    mlps = mixed(config, experts, sparse_after(config, absent=3))
    layers = stacked([_latent_attention(config)] * layer_count(config), mlps)
    return model(config, Family.DEEPSEEK_V3, layers, mtp_count(config))


def _latent_attention(config: ConfigReader) -> LatentAttention:
    heads, groups = config.size("num_attention_heads"), config.size_or_none("num_key_value_heads")
    if groups not in (None, heads):
        config.refuse_model(
            f"num_key_value_heads {groups} is not num_attention_heads {heads}; heads of latent attention share none"
        )
    # null switches the compression of queries off; only a missing key has a default.
    query_rank = None if config.is_null("q_lora_rank") else config.size("q_lora_rank", absent=1536)
    return LatentAttention(
        heads=heads,
        query_rank=query_rank,
        key_value_rank=config.size("kv_lora_rank", absent=512),
        nope_dim=config.size("qk_nope_head_dim", absent=128),
        rope_dim=config.size("qk_rope_head_dim", absent=64),
        value_dim=config.size("v_head_dim", absent=128),
        bias=config.flag("attention_bias"),
    )
