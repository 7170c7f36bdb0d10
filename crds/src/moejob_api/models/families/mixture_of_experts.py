"""Families of experts behind grouped attention: Mixtral, Qwen2-MoE, Qwen3-MoE, Qwen3-Next, GLM-4.5 and gpt-oss."""

from __future__ import annotations

from dataclasses import replace

from moejob_api.models.families.layers import (
    FULL,
    build_shape,
    expert_layers_after_dense,
    expert_layers_by_step,
    grouped_attention,
    layer_count,
    mixed_mlps,
    mtp_count,
    optional_window,
    refuse_uneven_groups,
    stack_layers,
    window_or_none,
    windowed_attentions,
)
from moejob_api.models.reader import ConfigReader
from moejob_api.models.shape import Experts, Family, LinearAttention, ModelShape

LINEAR = "linear_attention"


def mixtral_shape(config: ConfigReader) -> ModelShape:
    """Mixtral: experts in every layer."""
    attention = replace(grouped_attention(config), window=config.read_optional_size("sliding_window"))
    # Older files say num_local_experts; where both are given, Transformers takes the other one.
    experts = _read_experts(config, "num_experts", "num_local_experts", intermediate="intermediate_size")
    count = layer_count(config)
    return build_shape(
        config, Family.MIXTRAL, stack_layers([attention] * count, mixed_mlps(config, experts, [True] * count))
    )


def qwen2_moe_shape(config: ConfigReader) -> ModelShape:
    """Qwen1.5-MoE and Qwen2-MoE: a shared expert behind a gate."""
    full = replace(grouped_attention(config), qkv_bias=config.read_flag("qkv_bias", absent=True))
    last_sliding = config.read_size("max_window_layers", absent=28, smallest=0)
    slides = [index % 2 == 0 and index < last_sliding for index in range(layer_count(config))]
    attentions = windowed_attentions(config, full, optional_window(config), slides)
    mlps = mixed_mlps(config, _gated_experts(config), expert_layers_by_step(config))
    return build_shape(config, Family.QWEN2_MOE, stack_layers(attentions, mlps))


def qwen3_moe_shape(config: ConfigReader) -> ModelShape:
    """Qwen3 with experts."""
    bias = config.read_flag("attention_bias")
    plain = replace(grouped_attention(config), qkv_bias=bias, output_bias=bias, head_norm=True)
    attention = replace(plain, window=optional_window(config))
    mlps = mixed_mlps(config, _read_experts(config, "num_local_experts", "num_experts"), expert_layers_by_step(config))
    return build_shape(config, Family.QWEN3_MOE, stack_layers([attention] * len(mlps), mlps))


def qwen3_next_shape(config: ConfigReader) -> ModelShape:
    """Qwen3-Next: gated attention in every fourth layer, the gated delta rule in the others."""
    bias = config.read_flag("attention_bias")
    plain = grouped_attention(config, head_dim=256)
    full = replace(plain, qkv_bias=bias, output_bias=bias, head_norm=True, output_gate=True)
    linear = _linear_attention(config)
    attentions = [full if is_full else linear for is_full in _full_attention_layers(config)]
    mlps = mixed_mlps(config, _gated_experts(config), expert_layers_by_step(config))
    return build_shape(config, Family.QWEN3_NEXT, stack_layers(attentions, mlps))


def glm4_moe_shape(config: ConfigReader) -> ModelShape:
    """GLM-4.5: DeepSeek's experts behind grouped attention."""
    plain = grouped_attention(config)
    attention = replace(plain, qkv_bias=config.read_flag("attention_bias"), head_norm=config.read_flag("use_qk_norm"))
    experts = shared_experts(config, absent=1, sigmoid=True)
    refuse_uneven_groups(config, experts, absent_groups=1, absent_kept=1)
    mlps = mixed_mlps(config, experts, expert_layers_after_dense(config, absent=1))
    return build_shape(config, Family.GLM4_MOE, stack_layers([attention] * len(mlps), mlps), mtp_count(config))


def gpt_oss_shape(config: ConfigReader) -> ModelShape:
    """gpt-oss: biases everywhere, a learned sink for each head, a window in every other layer."""
    bias = config.read_flag("attention_bias", absent=True)
    plain = grouped_attention(config, head_dim=64)
    full = replace(plain, qkv_bias=bias, output_bias=bias, sinks=True)
    count = layer_count(config)
    attentions = windowed_attentions(
        config, full, window_or_none(config, absent=128), [index % 2 == 0 for index in range(count)]
    )
    plain_experts = _read_experts(config, "num_experts", "num_local_experts", intermediate="intermediate_size")
    experts = replace(plain_experts, bias=True, router_bias=True)
    return build_shape(config, Family.GPT_OSS, stack_layers(attentions, mixed_mlps(config, experts, [True] * count)))


def shared_experts(config: ConfigReader, *, absent: int, sigmoid: bool) -> Experts:
    """Experts in DeepSeek's way, where `absent` is how many are shared when the file does not say."""
    config.require_value("scoring_func", "sigmoid" if sigmoid else "softmax", "Transformers computes nothing else")
    shared = config.read_size("n_shared_experts", absent=absent, smallest=0)
    alias = "num_local_experts" if sigmoid else "num_experts"
    experts = _read_experts(config, alias, "n_routed_experts")
    return replace(experts, shared_intermediate=shared * experts.intermediate, sigmoid_scores=sigmoid)


def _read_experts(config: ConfigReader, *names: str, intermediate: str = "moe_intermediate_size") -> Experts:
    return Experts(
        count=config.read_first_size(*names),
        per_token=config.read_size("num_experts_per_tok"),
        intermediate=config.read_size(intermediate),
    )


def _gated_experts(config: ConfigReader) -> Experts:
    shared = config.read_size("shared_expert_intermediate_size", smallest=0)
    return replace(_read_experts(config, "num_experts"), shared_intermediate=shared, shared_gate=True)


def _linear_attention(config: ConfigReader) -> LinearAttention:
    key_heads = config.read_size("linear_num_key_heads", absent=16)
    value_heads = config.read_size("linear_num_value_heads", absent=32)
    if value_heads % key_heads:
        config.refuse_model(
            f"linear_num_value_heads {value_heads} is not a multiple of linear_num_key_heads {key_heads}"
        )
    return LinearAttention(
        key_heads=key_heads,
        value_heads=value_heads,
        key_dim=config.read_size("linear_key_head_dim", absent=128),
        value_dim=config.read_size("linear_value_head_dim", absent=128),
        convolution_width=config.read_size("linear_conv_kernel_dim", absent=4),
    )


def _full_attention_layers(config: ConfigReader) -> list[bool]:
    count = layer_count(config)
    kinds = config.read_kinds("layer_types", (LINEAR, FULL), count)
    if kinds is not None:
        return [kind == FULL for kind in kinds]
    interval = config.read_size("full_attention_interval", absent=4)
    return [(index + 1) % interval == 0 for index in range(count)]
