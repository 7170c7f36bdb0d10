"""Families of experts behind grouped attention: Mixtral, Qwen2-MoE, Qwen3-MoE, Qwen3-Next, GLM-4.5 and gpt-oss."""

from __future__ import annotations

from dataclasses import replace

from moejob_api.models.families.layers import (
    FULL,
    grouped_attention,
    layer_count,
    mixed,
    model,
    mtp_count,
    optional_window,
    refuse_uneven_groups,
    sparse_after,
    sparse_by_step,
    stacked,
    window_or_none,
    windowed,
)
from moejob_api.models.reader import ConfigReader
from moejob_api.models.shape import Experts, Family, LinearAttention, ModelShape

LINEAR = "linear_attention"


def mixtral(config: ConfigReader) -> ModelShape:
    """Mixtral: experts in every layer."""
    attention = replace(grouped_attention(config), window=config.size_or_none("sliding_window"))
    # Older files say num_local_experts; where both are given, Transformers takes the other one.
    experts = _experts(config, "num_experts", "num_local_experts", intermediate="intermediate_size")
    count = layer_count(config)
    return model(config, Family.MIXTRAL, stacked([attention] * count, mixed(config, experts, [True] * count)))


def qwen2_moe(config: ConfigReader) -> ModelShape:
    """Qwen1.5-MoE and Qwen2-MoE: a shared expert behind a gate."""
    full = replace(grouped_attention(config), qkv_bias=config.flag("qkv_bias", absent=True))
    last_sliding = config.size("max_window_layers", absent=28, smallest=0)
    slides = [index % 2 == 0 and index < last_sliding for index in range(layer_count(config))]
    attentions = windowed(config, full, optional_window(config), slides)
    mlps = mixed(config, _gated_experts(config), sparse_by_step(config))
    return model(config, Family.QWEN2_MOE, stacked(attentions, mlps))


def qwen3_moe(config: ConfigReader) -> ModelShape:
    """Qwen3 with experts."""
    bias = config.flag("attention_bias")
    plain = replace(grouped_attention(config), qkv_bias=bias, output_bias=bias, head_norm=True)
    attention = replace(plain, window=optional_window(config))
    mlps = mixed(config, _experts(config, "num_local_experts", "num_experts"), sparse_by_step(config))
    return model(config, Family.QWEN3_MOE, stacked([attention] * len(mlps), mlps))


def qwen3_next(config: ConfigReader) -> ModelShape:
    """Qwen3-Next: gated attention in every fourth layer, the gated delta rule in the others."""
    bias = config.flag("attention_bias")
    plain = grouped_attention(config, head_dim=256)
    full = replace(plain, qkv_bias=bias, output_bias=bias, head_norm=True, output_gate=True)
    linear = _linear_attention(config)
    attentions = [full if is_full else linear for is_full in _full_attention_layers(config)]
    mlps = mixed(config, _gated_experts(config), sparse_by_step(config))
    return model(config, Family.QWEN3_NEXT, stacked(attentions, mlps))


def glm4_moe(config: ConfigReader) -> ModelShape:
    """GLM-4.5: DeepSeek's experts behind grouped attention."""
    plain = grouped_attention(config)
    attention = replace(plain, qkv_bias=config.flag("attention_bias"), head_norm=config.flag("use_qk_norm"))
    experts = shared_experts(config, absent=1, sigmoid=True)
    refuse_uneven_groups(config, experts, absent_groups=1, absent_kept=1)
    mlps = mixed(config, experts, sparse_after(config, absent=1))
    return model(config, Family.GLM4_MOE, stacked([attention] * len(mlps), mlps), mtp_count(config))


def gpt_oss(config: ConfigReader) -> ModelShape:
    """gpt-oss: biases everywhere, a learned sink for each head, a window in every other layer."""
    bias = config.flag("attention_bias", absent=True)
    plain = grouped_attention(config, head_dim=64)
    full = replace(plain, qkv_bias=bias, output_bias=bias, sinks=True)
    count = layer_count(config)
    attentions = windowed(config, full, window_or_none(config, absent=128), [index % 2 == 0 for index in range(count)])
    plain_experts = _experts(config, "num_experts", "num_local_experts", intermediate="intermediate_size")
    experts = replace(plain_experts, bias=True, router_bias=True)
    return model(config, Family.GPT_OSS, stacked(attentions, mixed(config, experts, [True] * count)))


def shared_experts(config: ConfigReader, *, absent: int, sigmoid: bool) -> Experts:
    """Experts in DeepSeek's way, where `absent` is how many are shared when the file does not say."""
    config.only("scoring_func", "sigmoid" if sigmoid else "softmax", "Transformers computes nothing else")
    shared = config.size("n_shared_experts", absent=absent, smallest=0)
    alias = "num_local_experts" if sigmoid else "num_experts"
    experts = _experts(config, alias, "n_routed_experts")
    return replace(experts, shared_intermediate=shared * experts.intermediate, sigmoid_scores=sigmoid)


def _experts(config: ConfigReader, *names: str, intermediate: str = "moe_intermediate_size") -> Experts:
    return Experts(
        count=config.first_size(*names),
        per_token=config.size("num_experts_per_tok"),
        intermediate=config.size(intermediate),
    )


def _gated_experts(config: ConfigReader) -> Experts:
    shared = config.size("shared_expert_intermediate_size", smallest=0)
    return replace(_experts(config, "num_experts"), shared_intermediate=shared, shared_gate=True)


def _linear_attention(config: ConfigReader) -> LinearAttention:
    key_heads = config.size("linear_num_key_heads", absent=16)
    value_heads = config.size("linear_num_value_heads", absent=32)
    if value_heads % key_heads:
        config.refuse_model(
            f"linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}"
        )
    return LinearAttention(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=config.size("linear_key_head_dim", absent=128),
        value_dim=config.size("linear_value_head_dim", absent=128),
        convolution_width=config.size("linear_conv_kernel_dim", absent=4),
    )


def _full_attention_layers(config: ConfigReader) -> list[bool]:
    count = layer_count(config)
    kinds = config.kinds("layer_types", (LINEAR, FULL), count)
    if kinds is not None:
        return [kind == FULL for kind in kinds]
    interval = config.size("full_attention_interval", absent=4)
    return [(index + 1) % interval == 0 for index in range(count)]
