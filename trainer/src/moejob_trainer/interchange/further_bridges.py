"""Bridges of the families that Megatron-Bridge lacks, made of its own parts: Mixtral and Qwen2-MoE.

Both are its Qwen3-MoE with other names. Each states the settings of Megatron's layers, from which GPTModel computes
what Transformers computes, and the name of each tensor.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import Any

_LAYER, _THEIR_LAYER = "decoder.layers.*", "model.layers.*"
_ENDS: Mapping[str, str] = {
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "output_layer.weight": "lm_head.weight",
    "decoder.final_layernorm.weight": "model.norm.weight",
}
_OF_LAYER: Mapping[str, str] = {
    "self_attention.linear_qkv.layer_norm_weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
}
_MIXTRAL: Mapping[str, str] = {
    "mlp.router.weight": "block_sparse_moe.gate.weight",
    "mlp.experts.linear_fc2.weight*": "block_sparse_moe.experts.*.w2.weight",
}
# A layer of Qwen2-MoE without experts has a dense MLP, with the norm under its name in such a layer.
_QWEN2_MOE: Mapping[str, str] = {
    "mlp.router.weight": "mlp.gate.weight",
    "mlp.experts.linear_fc2.weight*": "mlp.experts.*.down_proj.weight",
    "mlp.shared_experts.linear_fc2.weight": "mlp.shared_expert.down_proj.weight",
    "mlp.shared_experts.gate_weight": "mlp.shared_expert_gate.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
    "mlp.linear_fc1.layer_norm_weight": "post_attention_layernorm.weight",
}
_QWEN2_MOE_GATED: Mapping[str, str] = {
    "mlp.experts.linear_fc1.weight*": "mlp.experts.*",
    "mlp.shared_experts.linear_fc1.weight": "mlp.shared_expert",
    "mlp.linear_fc1.weight": "mlp",
}


def register_bridges() -> None:
    """Make Megatron-Bridge know these families; a second call changes nothing."""
    bridges = import_module("megatron.bridge").AutoBridge.list_supported_models()
    conversion = import_module("megatron.bridge.models.conversion.model_bridge")
    gpt_model = import_module("megatron.core.models.gpt.gpt_model").GPTModel
    for architecture, read_settings, list_mappings in (
        ("MixtralForCausalLM", _mixtral_settings, _mixtral_mappings),
        ("Qwen2MoeForCausalLM", _qwen2_moe_settings, _qwen2_moe_mappings),
    ):
        if architecture in bridges:
            continue
        bridge = _make_bridge(conversion.MegatronModelBridge, read_settings, list_mappings)
        published = getattr(import_module("transformers"), architecture)
        conversion.MegatronModelBridge.register_bridge(source=published, target=gpt_model)(bridge)


def _make_bridge(base: Any, read_settings: Any, list_mappings: Any) -> Any:
    registry = import_module("megatron.bridge.models.conversion.mapping_registry")

    def provider_bridge(self: Any, published: Any) -> Any:
        provider = base.provider_bridge(self, published)
        for name, value in {**_SETTINGS, **read_settings(published.config)}.items():
            setattr(provider, name, value)
        return provider

    def mapping_registry(_: Any) -> Any:
        return registry.MegatronMappingRegistry(*list_mappings())

    return type("FurtherBridge", (base,), {"provider_bridge": provider_bridge, "mapping_registry": mapping_registry})


_SETTINGS: Mapping[str, Any] = {
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "hidden_dropout": 0.0,
    "qk_layernorm": False,
    "position_embedding_type": "rope",
    "moe_grouped_gemm": True,
    "moe_router_load_balancing_type": "aux_loss",
    "moe_token_dispatcher_type": "alltoall",
}


def _mixtral_settings(config: Any) -> Mapping[str, Any]:
    return {
        "add_qkv_bias": False,
        "moe_ffn_hidden_size": config.intermediate_size,
        "moe_router_pre_softmax": False,
    }


def _qwen2_moe_settings(config: Any) -> Mapping[str, Any]:
    step, dense = config.decoder_sparse_step, config.mlp_only_layers or ()
    has_experts = [layer not in dense and not (layer + 1) % step for layer in range(config.num_hidden_layers)]
    specs = import_module("megatron.core.models.gpt.gpt_layer_specs")
    return {
        # Core's other specs give every layer experts.
        "transformer_layer_spec": partial(
            specs.get_gpt_decoder_block_spec, use_transformer_engine=find_spec("transformer_engine") is not None
        ),
        "add_qkv_bias": config.qkv_bias,
        "moe_layer_freq": [int(is_mixture) for is_mixture in has_experts],
        "moe_router_pre_softmax": not config.norm_topk_prob,
        "moe_shared_expert_intermediate_size": config.shared_expert_intermediate_size,
        "moe_shared_expert_gate": True,
    }


def _mixtral_mappings() -> list[Any]:
    gated = {"mlp.experts.linear_fc1.weight*": "block_sparse_moe.experts.*"}
    return [*_plain_mappings(_MIXTRAL), *_gated_mappings(gated, "w1", "w3"), _head_mapping("weight")]


def _qwen2_moe_mappings() -> list[Any]:
    gated = _gated_mappings(_QWEN2_MOE_GATED, "gate_proj", "up_proj")
    return [*_plain_mappings(_QWEN2_MOE), *gated, _head_mapping("weight"), _head_mapping("bias")]


def _plain_mappings(names: Mapping[str, str]) -> list[Any]:
    of_layers = {f"{_LAYER}.{ours}": f"{_THEIR_LAYER}.{theirs}" for ours, theirs in {**_OF_LAYER, **names}.items()}
    mapping = _param_mapping().AutoMapping
    return [mapping(megatron_param=ours, hf_param=theirs) for ours, theirs in {**_ENDS, **of_layers}.items()]


def _gated_mappings(names: Mapping[str, str], gate: str, up: str) -> list[Any]:
    mapping = _param_mapping().GatedMLPMapping
    return [
        mapping(
            megatron_param=f"{_LAYER}.{ours}",
            gate=f"{_THEIR_LAYER}.{theirs}.{gate}.weight",
            up=f"{_THEIR_LAYER}.{theirs}.{up}.weight",
        )
        for ours, theirs in names.items()
    ]


def _head_mapping(kind: str) -> Any:
    projections = {name: f"{_THEIR_LAYER}.self_attn.{name}_proj.{kind}" for name in "qkv"}
    return _param_mapping().QKVMapping(megatron_param=f"{_LAYER}.self_attention.linear_qkv.{kind}", **projections)


def _param_mapping() -> Any:
    return import_module("megatron.bridge.models.conversion.param_mapping")
