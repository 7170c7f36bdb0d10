"""Small config.json contents of every family: no two sizes alike, so that a mixed-up pair changes the count."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from moejob_api.models.shape import Family

MISSING = object()

_SIZES: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 5,
    "num_attention_heads": 6,
    "vocab_size": 40,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
_GROUPED = _SIZES | {"num_key_value_heads": 2, "head_dim": 10, "intermediate_size": 14}
_QWEN_EXPERTS: dict[str, Any] = {"num_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 18}
_LINEAR: dict[str, Any] = {
    "shared_expert_intermediate_size": 20,
    "linear_num_key_heads": 3,
    "linear_num_value_heads": 9,
    "linear_key_head_dim": 6,
    "linear_value_head_dim": 4,
    "linear_conv_kernel_dim": 5,
}
_DEEPSEEK_EXPERTS: dict[str, Any] = {
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 18,
    "first_k_dense_replace": 2,
}
_LATENT = _SIZES | {
    "intermediate_size": 14,
    "q_lora_rank": 22,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 12,
}
_MIXTRAL_EXPERTS: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 3}

SMALL: dict[Family, dict[str, Any]] = {
    Family.LLAMA: _GROUPED,
    Family.QWEN2: _GROUPED,
    Family.QWEN3: _GROUPED,
    Family.MIXTRAL: _GROUPED | _MIXTRAL_EXPERTS,
    Family.QWEN2_MOE: _GROUPED | _QWEN_EXPERTS | {"shared_expert_intermediate_size": 20},
    Family.QWEN3_MOE: _GROUPED | _QWEN_EXPERTS,
    Family.QWEN3_NEXT: _GROUPED | _QWEN_EXPERTS | _LINEAR,
    Family.QWEN3_5_MOE: _GROUPED | _QWEN_EXPERTS | _LINEAR,
    Family.DEEPSEEK_V2: _LATENT | _DEEPSEEK_EXPERTS,
    Family.DEEPSEEK_V3: _LATENT | _DEEPSEEK_EXPERTS | {"num_nextn_predict_layers": 1, "n_group": 2, "topk_group": 1},
    Family.GLM4_MOE: _GROUPED | _DEEPSEEK_EXPERTS | {"num_nextn_predict_layers": 1},
    Family.GLM4_MOE_LITE: _LATENT
    | {key: value for key, value in _DEEPSEEK_EXPERTS.items() if key != "first_k_dense_replace"}
    | {"num_nextn_predict_layers": 1, "num_key_value_heads": 6},
    Family.OLMOE: _SIZES
    | {"num_key_value_heads": 2, "intermediate_size": 14, "num_experts": 8, "num_experts_per_tok": 3},
    Family.ERNIE4_5_MOE: _GROUPED
    | {"moe_num_experts": 8, "moe_k": 3, "moe_intermediate_size": 18, "moe_num_shared_experts": 2},
    Family.MINIMAX_M2: _GROUPED | _MIXTRAL_EXPERTS | {"rotary_dim": 6},
    Family.GPT_OSS: _GROUPED | _MIXTRAL_EXPERTS,
}


def config(family: Family, **changes: Any) -> dict[str, Any]:
    """The small config of a family with some keys changed; MISSING removes one."""
    changed = {"model_type": str(family)} | SMALL[family] | changes
    return {key: value for key, value in changed.items() if value is not MISSING}


_SPARSE_STEP: dict[str, Any] = {"decoder_sparse_step": 2, "mlp_only_layers": [3]}
_WINDOW: dict[str, Any] = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
_ALTERNATING = ["full_attention", "sliding_attention", "full_attention", "full_attention", "sliding_attention"]

# What no published model does, or only some do: (name, family, changes).
ODD: list[tuple[str, Family, dict[str, Any]]] = [
    ("llama as small", Family.LLAMA, {}),
    ("llama with biases", Family.LLAMA, {"attention_bias": True, "mlp_bias": True}),
    ("llama tied", Family.LLAMA, {"tie_word_embeddings": True}),
    ("llama before grouped heads", Family.LLAMA, {"num_key_value_heads": MISSING, "head_dim": MISSING}),
    ("llama with null heads", Family.LLAMA, {"num_key_value_heads": None, "head_dim": None}),
    ("qwen2 as small", Family.QWEN2, {}),
    ("qwen2 tied", Family.QWEN2, {"tie_word_embeddings": True, "head_dim": MISSING}),
    ("qwen2 with uneven heads", Family.QWEN2, {"head_dim": MISSING, "num_attention_heads": 10}),
    ("qwen2 with windows", Family.QWEN2, _WINDOW),
    ("qwen2 with windows by list", Family.QWEN2, _WINDOW | {"layer_types": _ALTERNATING}),
    ("qwen2 with a window of no stated size", Family.QWEN2, _WINDOW | {"sliding_window": MISSING}),
    ("qwen3 as small", Family.QWEN3, {}),
    ("qwen3 with biases, tied", Family.QWEN3, {"attention_bias": True, "tie_word_embeddings": True}),
    ("qwen3 without a head size", Family.QWEN3, {"head_dim": MISSING}),
    ("mixtral as small", Family.MIXTRAL, {}),
    ("mixtral with a window", Family.MIXTRAL, {"sliding_window": 7, "head_dim": MISSING}),
    ("mixtral with the newer name", Family.MIXTRAL, {"num_experts": 6}),
    ("qwen2_moe as small", Family.QWEN2_MOE, {}),
    ("qwen2_moe with plain layers", Family.QWEN2_MOE, _SPARSE_STEP),
    ("qwen2_moe without biases", Family.QWEN2_MOE, {"qkv_bias": False, "head_dim": MISSING}),
    ("qwen2_moe with windows", Family.QWEN2_MOE, _WINDOW),
    ("qwen2_moe with an empty shared expert", Family.QWEN2_MOE, {"shared_expert_intermediate_size": 0}),
    ("qwen3_moe as small", Family.QWEN3_MOE, {}),
    ("qwen3_moe with plain layers, biases", Family.QWEN3_MOE, _SPARSE_STEP | {"attention_bias": True}),
    ("qwen3_moe with a window", Family.QWEN3_MOE, _WINDOW | {"head_dim": MISSING}),
    ("qwen3_moe with the older name", Family.QWEN3_MOE, {"num_local_experts": 6}),
    ("qwen3_moe with all layers plain", Family.QWEN3_MOE, {"mlp_only_layers": [0, 1, 2, 3, 4, 9]}),
    ("qwen3_next as small", Family.QWEN3_NEXT, {}),
    ("qwen3_next with plain layers, biases", Family.QWEN3_NEXT, _SPARSE_STEP | {"attention_bias": True}),
    ("qwen3_next with another interval", Family.QWEN3_NEXT, {"full_attention_interval": 2}),
    ("qwen3_next by list", Family.QWEN3_NEXT, {"layer_types": ["full_attention"] * 2 + ["linear_attention"] * 3}),
    ("qwen3_next without a head size", Family.QWEN3_NEXT, {"head_dim": MISSING}),
    ("qwen3_5_moe as small", Family.QWEN3_5_MOE, {}),
    ("qwen3_5_moe with biases, tied", Family.QWEN3_5_MOE, {"attention_bias": True, "tie_word_embeddings": True}),
    ("qwen3_5_moe with another interval", Family.QWEN3_5_MOE, {"full_attention_interval": 2, "head_dim": MISSING}),
    ("deepseek_v2 as small", Family.DEEPSEEK_V2, {}),
    ("deepseek_v2 with whole queries", Family.DEEPSEEK_V2, {"q_lora_rank": None, "attention_bias": True}),
    ("deepseek_v2 by defaults", Family.DEEPSEEK_V2, {"first_k_dense_replace": MISSING, "n_shared_experts": MISSING}),
    ("deepseek_v3 as small", Family.DEEPSEEK_V3, {}),
    ("deepseek_v3 with biases", Family.DEEPSEEK_V3, {"attention_bias": True, "n_shared_experts": 0}),
    ("deepseek_v3 with whole queries", Family.DEEPSEEK_V3, {"q_lora_rank": None, "attention_bias": True}),
    ("deepseek_v3 by defaults", Family.DEEPSEEK_V3, {"first_k_dense_replace": MISSING, "n_shared_experts": MISSING}),
    ("deepseek_v3 with default ranks", Family.DEEPSEEK_V3, {"q_lora_rank": MISSING, "kv_lora_rank": MISSING}),
    ("deepseek_v3 with all layers plain", Family.DEEPSEEK_V3, {"first_k_dense_replace": 9}),
    ("glm4_moe as small", Family.GLM4_MOE, {}),
    ("glm4_moe with norms and biases", Family.GLM4_MOE, {"use_qk_norm": True, "attention_bias": True}),
    ("glm4_moe by defaults", Family.GLM4_MOE, {"first_k_dense_replace": MISSING, "head_dim": MISSING}),
    ("glm4_moe_lite as small", Family.GLM4_MOE_LITE, {}),
    ("glm4_moe_lite with whole queries", Family.GLM4_MOE_LITE, {"q_lora_rank": None, "attention_bias": True}),
    ("glm4_moe_lite by list", Family.GLM4_MOE_LITE, {"mlp_layer_types": ["dense"] * 2 + ["sparse"] * 3}),
    ("glm4_moe_lite with default ranks", Family.GLM4_MOE_LITE, {"q_lora_rank": MISSING, "kv_lora_rank": MISSING}),
    ("olmoe as small", Family.OLMOE, {}),
    ("olmoe with a head for each, tied", Family.OLMOE, {"num_key_value_heads": None, "tie_word_embeddings": True}),
    ("ernie4_5_moe as small", Family.ERNIE4_5_MOE, {}),
    ("ernie4_5_moe tied by default", Family.ERNIE4_5_MOE, {"tie_word_embeddings": MISSING, "head_dim": MISSING}),
    ("ernie4_5_moe without shared", Family.ERNIE4_5_MOE, {"moe_num_shared_experts": 0, "moe_layer_end_index": 3}),
    ("ernie4_5_moe in turns", Family.ERNIE4_5_MOE, {"moe_layer_start_index": 2, "moe_layer_interval": 2}),
    ("minimax_m2 as small", Family.MINIMAX_M2, {}),
    ("minimax_m2 with whole heads turned", Family.MINIMAX_M2, {"rotary_dim": MISSING, "num_experts": 6}),
    ("gpt_oss as small", Family.GPT_OSS, {}),
    ("gpt_oss without biases", Family.GPT_OSS, {"attention_bias": False, "head_dim": MISSING}),
    ("gpt_oss with windows by list", Family.GPT_OSS, {"layer_types": _ALTERNATING, "sliding_window": 7}),
    ("gpt_oss without windows", Family.GPT_OSS, {"sliding_window": None}),
]


def any_config(family: Family) -> st.SearchStrategy[dict[str, Any]]:
    """Configs of a family with every size, switch and layer plan drawn at will."""
    sizes: dict[str, st.SearchStrategy[Any]] = {
        key: st.integers(2, 40)
        for key, value in SMALL[family].items()
        if isinstance(value, int) and not isinstance(value, bool) and key not in _COUPLED
    }
    switches = {key: st.booleans() for key in (*_SWITCHES.get(family, ()), "tie_word_embeddings")}
    drawn = st.fixed_dictionaries(
        sizes
        | switches
        | {
            "num_hidden_layers": st.integers(1, 6),
            "groups": st.integers(1, 4),
            "each": st.integers(1, 4),
            "decoder_sparse_step": st.integers(1, 3),
            "mlp_only_layers": st.lists(st.integers(0, 6), max_size=3),
            **({} if family is Family.GLM4_MOE_LITE else {"first_k_dense_replace": st.integers(0, 6)}),
            "experts": st.integers(1, 9),
        }
    )
    return drawn.map(lambda values: config(family, **_coupled(family, values)))


_COUPLED = {"num_attention_heads", "num_key_value_heads", "hidden_size", "head_dim", "rotary_dim"}
_SWITCHES: dict[Family, tuple[str, ...]] = {
    Family.LLAMA: ("attention_bias", "mlp_bias"),
    Family.QWEN3: ("attention_bias",),
    Family.QWEN2_MOE: ("qkv_bias",),
    Family.QWEN3_MOE: ("attention_bias",),
    Family.QWEN3_NEXT: ("attention_bias",),
    Family.QWEN3_5_MOE: ("attention_bias",),
    Family.DEEPSEEK_V2: ("attention_bias",),
    Family.DEEPSEEK_V3: ("attention_bias",),
    Family.GLM4_MOE: ("attention_bias", "use_qk_norm"),
    Family.GLM4_MOE_LITE: ("attention_bias",),
    Family.GPT_OSS: ("attention_bias",),
}


def _coupled(family: Family, values: dict[str, Any]) -> dict[str, Any]:
    """The drawn values, with those that depend on each other put in step."""
    groups, each, experts = values.pop("groups"), values.pop("each"), values.pop("experts")
    heads = groups * each
    values |= {"num_attention_heads": heads, "num_key_value_heads": groups, "hidden_size": 2 * heads * experts}
    values |= {key: experts for key in ("num_experts", "num_local_experts", "n_routed_experts") if key in SMALL[family]}
    values |= {"num_experts_per_tok": max(1, experts // 2)}
    if family is Family.ERNIE4_5_MOE:
        values |= {"moe_num_experts": experts, "moe_k": max(1, experts // 2)}
    if "n_routed_experts" in values:
        # Groups of sigmoid scores hold two experts at least, and pairs of elements turn.
        values |= {"n_routed_experts": 2 * experts, "n_group": 1 + (experts > 1), "topk_group": 1}
    if "qk_rope_head_dim" in values:
        values |= {"qk_rope_head_dim": 2 * values["qk_rope_head_dim"], "num_key_value_heads": heads}
    if family in {Family.QWEN3_NEXT, Family.QWEN3_5_MOE}:
        values |= {"linear_num_key_heads": groups, "linear_num_value_heads": heads}
    return values
