"""Every key of every family's config.json with its treatment: tables that the reader of configs and a test use.

Transformers defines the meaning of a key. A test compares these tables with its config classes and with every key that
its model code reads, so that no new version adds a key that this module silently ignores. Transformers does not read a
key that is in no table.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moejob_api.models.reader import ConfigReader, shown_value
from moejob_api.models.shape import Family


@dataclass(frozen=True, slots=True)
class UsedKey:
    """Read, checked and computed with: by the shape of a family, by rotary.py and routing.py, or by the trainer."""


@dataclass(frozen=True, slots=True)
class HarmlessKey:
    """A key without influence on training, for this reason."""

    why: str


@dataclass(frozen=True, slots=True)
class RestrictedKey:
    """Refused with any value but these; the reason ends with the fix."""

    accepted: tuple[object, ...]
    why: str


@dataclass(frozen=True, slots=True)
class PositiveKey:
    """A number above zero that the trainer computes with."""


@dataclass(frozen=True, slots=True)
class SwitchKey:
    """true or false, which the trainer computes with."""


KeyTreatment = UsedKey | HarmlessKey | RestrictedKey | PositiveKey | SwitchKey

USED = UsedKey()
_COPY = "change it in a copy of the model's folder if that is what you mean to train"
_NO_DROPOUT = RestrictedKey((0, None), f"the trainer computes attention without dropout; {_COPY}")
_GENERATION = HarmlessKey("only generation reads it")
_OF_THE_JOB = HarmlessKey("the job's moe section says how experts are balanced")
_OF_THE_TOKENIZER = HarmlessKey("tokens come from the tokenizer")
_NEW_MODELS = HarmlessKey("only weights that are made new would use it")
_OUTPUTS = HarmlessKey("says which outputs Transformers returns, not what they are")
_SILU = RestrictedKey(("silu", "swish"), f"the trainer computes no other activation; {_COPY}")

# The keys of every config class.
BASE_KEYS: dict[str, KeyTreatment] = {
    "model_type": USED,
    "architectures": USED,
    "quantization_config": USED,
    "compression_config": USED,
    "text_config": USED,
    "tie_word_embeddings": SwitchKey(),
    "_name_or_path": HarmlessKey("a name"),
    "transformers_version": HarmlessKey("which version wrote the file"),
    "dtype": HarmlessKey("model.dtype of the job says in which type is trained"),
    "torch_dtype": HarmlessKey("model.dtype of the job says in which type is trained"),
    "chunk_size_feed_forward": HarmlessKey("these families do not compute in chunks"),
    "is_encoder_decoder": RestrictedKey((False, None), "the trainer has decoders only; use a model that is one"),
    "id2label": HarmlessKey("labels of a classifier"),
    "label2id": HarmlessKey("labels of a classifier"),
    "problem_type": HarmlessKey("of a classifier"),
    "output_attentions": _OUTPUTS,
    "output_hidden_states": _OUTPUTS,
    "return_dict": _OUTPUTS,
    "use_cache": _GENERATION,
    "pad_token_id": _OF_THE_TOKENIZER,
    "bos_token_id": _OF_THE_TOKENIZER,
    "eos_token_id": _OF_THE_TOKENIZER,
    "auto_map": HarmlessKey("names Python code; Transformers' own code for the family is what is followed"),
}
_DECODER: dict[str, KeyTreatment] = BASE_KEYS | {
    "vocab_size": USED,
    "hidden_size": USED,
    "intermediate_size": USED,
    "num_hidden_layers": USED,
    "num_attention_heads": USED,
    "max_position_embeddings": USED,
    "hidden_act": _SILU,
    "rms_norm_eps": PositiveKey(),
    "attention_dropout": _NO_DROPOUT,
    "initializer_range": _NEW_MODELS,
    "rope_parameters": USED,
    "rope_scaling": USED,
    "rope_theta": USED,
    "partial_rotary_factor": USED,
}
_GROUPED: dict[str, KeyTreatment] = _DECODER | {"num_key_value_heads": USED, "head_dim": USED}
_WINDOWED: dict[str, KeyTreatment] = {
    "use_sliding_window": USED,
    "sliding_window": USED,
    "max_window_layers": USED,
    "layer_types": USED,
}
_ROUTED: dict[str, KeyTreatment] = {
    "num_experts_per_tok": USED,
    "output_router_logits": _OF_THE_JOB,
    "router_aux_loss_coef": _OF_THE_JOB,
}
_QWEN_EXPERTS: dict[str, KeyTreatment] = _ROUTED | {
    "num_experts": USED,
    "decoder_sparse_step": USED,
    "mlp_only_layers": USED,
    "moe_intermediate_size": USED,
    "norm_topk_prob": SwitchKey(),
}
# Linear attention in most layers, softmax attention in the others.
_HYBRID: dict[str, KeyTreatment] = {
    "attention_bias": USED,
    "shared_expert_intermediate_size": USED,
    "layer_types": USED,
    "full_attention_interval": USED,
    "linear_num_key_heads": USED,
    "linear_num_value_heads": USED,
    "linear_key_head_dim": USED,
    "linear_value_head_dim": USED,
    "linear_conv_kernel_dim": USED,
}
_MIXTRAL_EXPERTS: dict[str, KeyTreatment] = _ROUTED | {"num_local_experts": USED, "num_experts": USED}
_DEEPSEEK_EXPERTS: dict[str, KeyTreatment] = {
    "n_routed_experts": USED,
    "n_shared_experts": USED,
    "num_experts_per_tok": USED,
    "moe_intermediate_size": USED,
    "first_k_dense_replace": USED,
    "moe_layer_freq": USED,
    "scoring_func": USED,
    "n_group": USED,
    "topk_group": USED,
    "routed_scaling_factor": PositiveKey(),
    "output_router_logits": _OF_THE_JOB,
    "aux_loss_alpha": _OF_THE_JOB,
    "seq_aux": _OF_THE_JOB,
    "ep_size": HarmlessKey("the job's parallelism says it"),
}
_SIGMOID_EXPERTS: dict[str, KeyTreatment] = _DEEPSEEK_EXPERTS | {
    "num_local_experts": USED,
    "norm_topk_prob": SwitchKey(),
    "topk_method": RestrictedKey(
        ("noaux_tc", None), "Transformers computes nothing else for this family; use its own checkpoints"
    ),
    "num_nextn_predict_layers": USED,
    "num_mtp_layers": USED,
}
_LATENT: dict[str, KeyTreatment] = _DECODER | {
    "q_lora_rank": USED,
    "kv_lora_rank": USED,
    "qk_nope_head_dim": USED,
    "qk_rope_head_dim": USED,
    "v_head_dim": USED,
    "attention_bias": USED,
    "num_key_value_heads": USED,
    "head_dim": HarmlessKey("qk_nope_head_dim and qk_rope_head_dim say it"),
    "qk_head_dim": HarmlessKey("qk_nope_head_dim and qk_rope_head_dim say it"),
    "pretraining_tp": HarmlessKey("Transformers computes whole matrices whatever it says"),
}

KEYS: Mapping[Family, dict[str, KeyTreatment]] = {
    Family.LLAMA: _GROUPED
    | {
        "attention_bias": USED,
        "mlp_bias": USED,
        "pretraining_tp": HarmlessKey("Transformers computes whole matrices whatever it says"),
    },
    Family.QWEN2: _GROUPED | _WINDOWED,
    Family.QWEN3: _GROUPED | _WINDOWED | {"attention_bias": USED},
    Family.MIXTRAL: _GROUPED
    | _MIXTRAL_EXPERTS
    | {
        "sliding_window": USED,
        "router_jitter_noise": RestrictedKey((0, None), f"the trainer gives routers no noise; {_COPY}"),
    },
    Family.QWEN2_MOE: _GROUPED
    | _WINDOWED
    | _QWEN_EXPERTS
    | {"qkv_bias": USED, "shared_expert_intermediate_size": USED},
    Family.QWEN3_MOE: _GROUPED
    | _WINDOWED
    | _QWEN_EXPERTS
    | {
        "num_local_experts": USED,
        "attention_bias": USED,
        "max_window_layers": HarmlessKey("Transformers gives the window to every layer"),
        "layer_types": HarmlessKey("Transformers gives the window to every layer"),
    },
    Family.QWEN3_NEXT: _GROUPED | _QWEN_EXPERTS | _HYBRID,
    Family.QWEN3_5_MOE: {key: value for key, value in _GROUPED.items() if key != "intermediate_size"}
    | _ROUTED
    | _HYBRID
    | {
        "num_experts": USED,
        "moe_intermediate_size": USED,
        "attn_output_gate": RestrictedKey((True, None), "Transformers computes a gate whatever it says; remove it"),
    },
    Family.DEEPSEEK_V2: _LATENT
    | _DEEPSEEK_EXPERTS
    | {
        "num_experts": USED,
        "mlp_bias": USED,
        "topk_method": RestrictedKey(
            ("greedy", "group_limited_greedy"), "Transformers knows no other choice of experts; use one of the two"
        ),
        "norm_topk_prob": RestrictedKey(
            (False, None), f"Transformers does not renormalize this family's probabilities; {_COPY}"
        ),
    },
    Family.DEEPSEEK_V3: _LATENT | _SIGMOID_EXPERTS | {"rope_interleave": SwitchKey()},
    Family.GLM4_MOE: _GROUPED | _SIGMOID_EXPERTS | {"attention_bias": USED, "use_qk_norm": USED},
    Family.GLM4_MOE_LITE: _LATENT
    | _SIGMOID_EXPERTS
    | {
        "head_dim": USED,
        "mlp_layer_types": USED,
        "moe_layer_freq": RestrictedKey((1, None), "Transformers takes the layers of mlp_layer_types; remove it"),
        "rope_interleave": SwitchKey(),
    },
    Family.OLMOE: _GROUPED
    | _ROUTED
    | {
        "num_experts": USED,
        "num_local_experts": USED,
        "norm_topk_prob": SwitchKey(),
        "attention_bias": RestrictedKey((False, None), f"engines have no such bias; {_COPY}"),
        "clip_qkv": USED,
        "sliding_window": USED,
    },
    Family.ERNIE4_5_MOE: _GROUPED
    | _ROUTED
    | {
        "num_experts": USED,
        "moe_num_experts": USED,
        "moe_k": USED,
        "moe_intermediate_size": USED,
        "moe_num_shared_experts": USED,
        "moe_layer_start_index": USED,
        "moe_layer_end_index": USED,
        "moe_layer_interval": USED,
        "moe_norm_min": RestrictedKey((1e-12, None), f"the trainer has no other smallest sum; {_COPY}"),
        "use_bias": RestrictedKey((False, None), f"the trainer has no such biases in this family; {_COPY}"),
    },
    Family.MINIMAX_M2: _GROUPED
    | _MIXTRAL_EXPERTS
    | {
        "rotary_dim": USED,
        "router_jitter_noise": RestrictedKey((0, None), f"the trainer gives routers no noise; {_COPY}"),
    },
    Family.GPT_OSS: _GROUPED
    | _MIXTRAL_EXPERTS
    | {
        "attention_bias": USED,
        "sliding_window": USED,
        "layer_types": USED,
        "initial_context_length": HarmlessKey("rope_scaling says it"),
        "swiglu_limit": RestrictedKey((7.0, None), f"the trainer clamps at 7; {_COPY}"),
        "swiglu_alpha": RestrictedKey((1.702, None), f"the trainer computes with 1.702; {_COPY}"),
    },
}


def refuse_unknown_meanings(config: ConfigReader, family: Family) -> None:
    """Refuse the keys whose values mean what the trainer does not compute."""
    for key in KEYS[family].keys() & config.values.keys():
        match KEYS[family][key]:
            case RestrictedKey(accepted, why):
                config.require_one_of(key, accepted, why)
            case PositiveKey():
                config.require_positive(key)
            case SwitchKey():
                config.read_flag(key)
            case UsedKey() | HarmlessKey():
                pass
    _refuse_heads_of_other_tasks(config)
    _refuse_quantized(config, family)


def _refuse_heads_of_other_tasks(config: ConfigReader) -> None:
    names = config.values.get("architectures")
    if names is None:
        return
    if not isinstance(names, list) or not any(str(name).endswith("ForCausalLM") for name in names):
        config.refuse_model(
            f"architectures is {shown_value(names)}; only models that predict the next token are trained: use a "
            "checkpoint whose architectures name a class ...ForCausalLM"
        )


# Weights that are dequantized as they are read; families without an entry are published so by others at most.
_DEQUANTIZED: Mapping[Family, tuple[str, ...]] = {Family.GPT_OSS: ("fp8", "mxfp4")}


def _refuse_quantized(config: ConfigReader, family: Family) -> None:
    for key in ("quantization_config", "compression_config"):
        settings = config.values.get(key)
        if settings is None:
            continue
        accepted = _DEQUANTIZED.get(family, ("fp8",))
        method = settings.get("quant_method") if isinstance(settings, Mapping) else None
        if key != "quantization_config" or method not in accepted:
            config.refuse_model(
                f"{key} says quant_method {shown_value(method)}; the trainer reads {' and '.join(accepted)} only, and "
                f"exports none: use the model as it was before quantization, or remove {key} from a copy whose weights "
                "are bfloat16"
            )
