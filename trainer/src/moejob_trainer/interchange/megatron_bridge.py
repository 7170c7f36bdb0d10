"""Megatron-Bridge as it can be used without a GPU, without Transformer Engine and with the trainer's Transformers."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn
from transformers import AutoConfig, PretrainedConfig

from moejob_api.models.shape import Family
from moejob_trainer.conversion.checkpoint import unusable_checkpoint
from moejob_trainer.interchange.further_bridges import register_bridges

_TRANSFORMER_ENGINE = "transformer_engine"
# Each checks for Transformer Engine when it is first imported, and keeps the result.
_ASKING = (
    "megatron.core.extensions.transformer_engine",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.models.gpt.moe_module_specs",
    "megatron.core.models.hybrid.hybrid_layer_specs",
    "megatron.core.transformer.moe.moe_utils",
)


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
    config, bridges = read_published_config(folder), import_auto_bridge()
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


def import_auto_bridge() -> Any:
    """Return Megatron-Bridge's AutoBridge class; InvalidSpec where pip left it out."""
    if find_spec("megatron.bridge") is None:
        raise unusable_checkpoint(f"{BRIDGE} is not installed; install moejob-trainer[megatron]")
    for name in _ASKING:
        import_module(name)
    with _importable_transformer_engine(), _unchanged_logging():
        auto_bridge = import_module("megatron.bridge").AutoBridge
    register_bridges()
    return auto_bridge


def read_published_config(folder: Path) -> PretrainedConfig:
    """Return the config of a published model, as Megatron-Bridge expects it."""
    return adapt_config(AutoConfig.from_pretrained(folder, trust_remote_code=False))


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
    if rope["rope_type"] == "default" and hasattr(provider, "rope_type"):
        # Left at yarn, latent attention would compute something else.
        provider.rope_type, provider.rotary_scaling_factor = "rope", 1.0
        provider.mscale = provider.mscale_all_dim = 1.0


@contextmanager
def _unchanged_logging() -> Iterator[None]:
    """Keep the log: Megatron sends it to a handler of its own, at level INFO, when its training is imported."""
    root = logging.getLogger()
    level, handlers = root.level, [*root.handlers]
    logging.disable(logging.INFO)
    try:
        yield
    finally:
        logging.disable(logging.NOTSET)
        root.setLevel(level)
        root.handlers[:] = handlers


@contextmanager
def _importable_transformer_engine() -> Iterator[None]:
    """Let `megatron.bridge.peft` import what it names at its top: classes of layers that it would adapt."""
    if find_spec(_TRANSFORMER_ENGINE) is not None:
        yield
        return
    stand_ins = {f"{_TRANSFORMER_ENGINE}{suffix}": _empty_module(suffix) for suffix in ("", ".pytorch", ".pytorch.ops")}
    for name, module in stand_ins.items():
        parent, _, child = name.rpartition(".")
        setattr(stand_ins.get(parent, module), child, module)
    sys.modules.update(stand_ins)
    try:
        yield
    finally:
        # Other packages would take the stand-ins for the real modules.
        for name in stand_ins:
            del sys.modules[name]


def _empty_module(suffix: str) -> ModuleType:
    module = ModuleType(_TRANSFORMER_ENGINE + suffix)
    module.__spec__ = ModuleSpec(module.__name__, None, is_package=True)
    for name in ("Linear", "LayerNormLinear", "TransformerLayer", "Sequential"):
        setattr(module, name, type(name, (nn.Module,), {}))
    return module
