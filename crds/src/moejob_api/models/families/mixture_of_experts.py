"""Families of experts behind grouped attention: Mixtral, Qwen2-MoE, Qwen3-MoE, Qwen3-Next, Qwen3.5-MoE, GLM-4.5, OLMoE,
ERNIE-4.5, MiniMax-M2 and gpt-oss.
"""

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
    refuse_uneven_heads,
    stack_layers,
    window_or_none,
    windowed_attentions,
)
from moejob_api.models.reader import ConfigReader
from moejob_api.models.shape import Attention, Experts, Family, LinearAttention, ModelShape

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
    attentions = _hybrid_attentions(config, _linear_attention(config))
    mlps = mixed_mlps(config, _gated_experts(config), expert_layers_by_step(config))
    return build_shape(config, Family.QWEN3_NEXT, stack_layers(attentions, mlps))


def qwen3_5_moe_shape(config: ConfigReader) -> ModelShape:
    """The text part of Qwen3.5-MoE: layers of Qwen3-Next, each with experts."""
    attentions = _hybrid_attentions(config, replace(_linear_attention(config), separate_gates=True))
    mlps = mixed_mlps(config, _gated_experts(config), [True] * len(attentions))
    return build_shape(config, Family.QWEN3_5_MOE, stack_layers(attentions, mlps))


def glm4_moe_shape(config: ConfigReader) -> ModelShape:
    """GLM-4.5: DeepSeek's experts behind grouped attention."""
    plain = grouped_attention(config)
    attention = replace(plain, qkv_bias=config.read_flag("attention_bias"), head_norm=config.read_flag("use_qk_norm"))
    experts = shared_experts(config, absent=1, sigmoid=True)
    refuse_uneven_groups(config, experts, absent_groups=1, absent_kept=1)
    mlps = mixed_mlps(config, experts, expert_layers_after_dense(config, absent=1))
    return build_shape(config, Family.GLM4_MOE, stack_layers([attention] * len(mlps), mlps), mtp_count(config))


def olmoe_shape(config: ConfigReader) -> ModelShape:
    """OLMoE: queries and keys are normed over all their heads together."""
    refuse_uneven_heads(config)
    heads = config.read_size("num_attention_heads")
    head_dim = config.read_size("hidden_size") // heads
    config.require_value("head_dim", head_dim, "hidden_size / num_attention_heads says it; remove head_dim")
    config.require_value("sliding_window", None, "only some of Transformers' attentions would obey it")
    config.require_value("clip_qkv", None, "the trainer and engines clip no queries, keys and values")
    plain = grouped_attention(config, head_dim=head_dim, key_value_heads=heads)
    experts = _read_experts(config, "num_local_experts", "num_experts", intermediate="intermediate_size")
    count = layer_count(config)
    layers = stack_layers([replace(plain, joint_norm=True)] * count, mixed_mlps(config, experts, [True] * count))
    return build_shape(config, Family.OLMOE, layers)


def ernie4_5_moe_shape(config: ConfigReader) -> ModelShape:
    """ERNIE-4.5: shared experts, and a bias that moves the choice among softmax scores."""
    shared = config.read_size("moe_num_shared_experts", absent=2, smallest=0)
    width = config.read_size("moe_intermediate_size")
    experts = Experts(
        count=config.read_first_size("num_experts", "moe_num_experts"),
        per_token=config.read_first_size("num_experts_per_tok", "moe_k"),
        intermediate=width,
        shared_intermediate=shared * width,
        selection_bias=True,
    )
    mlps = mixed_mlps(config, experts, _expert_layers_in_range(config))
    layers = stack_layers([grouped_attention(config)] * len(mlps), mlps)
    return build_shape(config, Family.ERNIE4_5_MOE, layers, tied=True)


def _expert_layers_in_range(config: ConfigReader) -> list[bool]:
    """Return the layers that hold experts in ERNIE's way: every n-th of a range, whose end -1 is the last layer."""
    count, interval = layer_count(config), config.read_size("moe_layer_interval", absent=1)
    first = config.read_size("moe_layer_start_index", absent=1, smallest=0)
    last = config.read_size("moe_layer_end_index", absent=-1, smallest=-1)
    return [first <= index <= (count if last == -1 else last) and (index + 1) % interval == 0 for index in range(count)]


def minimax_m2_shape(config: ConfigReader) -> ModelShape:
    """MiniMax-M2: norms over all heads as in OLMoE, experts in every layer, chosen by sigmoid scores and a bias."""
    # Transformers' default of this family, whatever hidden_size / num_attention_heads is.
    attention = replace(grouped_attention(config, head_dim=128), joint_norm=True)
    experts = _read_experts(config, "num_experts", "num_local_experts", intermediate="intermediate_size")
    count = layer_count(config)
    mlps = mixed_mlps(config, replace(experts, selection_bias=True), [True] * count)
    return build_shape(config, Family.MINIMAX_M2, stack_layers([attention] * count, mlps))


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
    return replace(experts, shared_intermediate=shared * experts.intermediate, selection_bias=sigmoid)


def _read_experts(config: ConfigReader, *names: str, intermediate: str = "moe_intermediate_size") -> Experts:
    return Experts(
        count=config.read_first_size(*names),
        per_token=config.read_size("num_experts_per_tok"),
        intermediate=config.read_size(intermediate),
    )


def _gated_experts(config: ConfigReader) -> Experts:
    shared = config.read_size("shared_expert_intermediate_size", smallest=0)
    return replace(_read_experts(config, "num_experts"), shared_intermediate=shared, shared_gate=True)


def _hybrid_attentions(config: ConfigReader, linear: LinearAttention) -> list[Attention]:
    bias = config.read_flag("attention_bias")
    plain = grouped_attention(config, head_dim=256)
    full = replace(plain, qkv_bias=bias, output_bias=bias, head_norm=True, output_gate=True)
    return [full if is_full else linear for is_full in _full_attention_layers(config)]


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
