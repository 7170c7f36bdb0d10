"""Megatron-Bridge as it can be used without a GPU, without Transformer Engine and with the trainer's Transformers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from moejob_api.models.families import known_config
from moejob_api.models.shape import Family
from moejob_trainer.conversion.checkpoint import unusable_checkpoint
from moejob_trainer.interchange.bridge_import import has_bridge, import_auto_bridge
from moejob_trainer.runtime.json_files import read_json

BRIDGE = "Megatron-Bridge 0.6.2"
# The bridge silently ignores rotary embeddings that it does not know.
_ROTARY = ("default", "llama3", "yarn")


@dataclass(frozen=True)
class BridgedModel:
    """Megatron's configuration of a published model, and the bridge's mappings of its tensors."""

    provider: Any
    registry: Any


def read_bridged_model(folder: Path) -> BridgedModel:
    """Return Megatron-Bridge's model of a folder's config.json; InvalidSpec where it knows no such model."""
    config, bridges = read_published_config(folder), _require_auto_bridge()
    if not set(config.architectures or ()) & set(bridges.list_supported_models()):
        raise unusable_checkpoint(
            f"{BRIDGE} knows no {config.architectures or config.model_type}; it cannot be converted"
        )
    rotary = config.rope_parameters["rope_type"]
    if rotary not in _ROTARY:
        raise unusable_checkpoint(
            f"{folder}: {BRIDGE} does not know rope_type {rotary}; it converts {', '.join(_ROTARY)}"
        )
    bridge = bridges.from_hf_config(config)
    provider = bridge.to_megatron_provider(load_weights=False)
    # Its modules are not converted for every family.
    provider.mtp_num_layers = None
    adapt_provider(provider, config)
    return BridgedModel(provider, bridge._model_bridge.mapping_registry())  # noqa: SLF001 there is no other way


def _require_auto_bridge() -> Any:
    if not has_bridge():
        raise unusable_checkpoint(f"{BRIDGE} is not installed; install moejob-trainer[megatron]")
    return import_auto_bridge()


def read_published_config(folder: Path) -> PretrainedConfig:
    """Return the config of a published model, as Megatron-Bridge expects it."""
    return adapt_config(AutoConfig.for_model(**known_config(read_json(folder / "config.json"))))


def adapt_config(config: PretrainedConfig) -> PretrainedConfig:
    """Add the fields of Transformers 4 that version 5 stores elsewhere or no longer has."""
    # Without this field the bridge silently takes 10000.
    config.rope_theta = config.rope_parameters["rope_theta"]
    if config.model_type == Family.DEEPSEEK_V3:
        # Published configs have it; Transformers computes nothing else and drops the field.
        config.scoring_func = "sigmoid"
    return config


def adapt_provider(provider: Any, config: PretrainedConfig) -> None:
    """Correct what the bridge reads of a config in another way than the model's own code."""
    rope = config.rope_parameters
    if config.model_type == Family.GPT_OSS:
        # The bridge has the numbers of the published models, whatever a config says.
        provider.window_attn_skip_freq = [int(kind == "sliding_attention") for kind in config.layer_types]
        if rope["rope_type"] == "yarn":
            provider.yarn_rotary_scaling_factor = rope["factor"]
            provider.yarn_original_max_position_embeddings = rope["original_max_position_embeddings"]
        else:
            provider.position_embedding_type = "rope"
    if config.model_type == Family.GLM4_MOE:
        # The bridge counts one shared expert, whatever a config says.
        provider.moe_shared_expert_intermediate_size = config.n_shared_experts * config.moe_intermediate_size
    if rope["rope_type"] == "default" and hasattr(provider, "rope_type"):
        # Left at yarn, latent attention would compute something else.
        provider.rope_type, provider.rotary_scaling_factor = "rope", 1.0
        provider.mscale = provider.mscale_all_dim = 1.0
