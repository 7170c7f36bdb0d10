"""Megatron-Bridge without Transformer Engine: the settings of a `GPTModel` out of a published config."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import nn
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moejob_api.models.shape import Family
from moejob_trainer.errors import BadConfiguration

# The one module of Bridge that imports Transformer Engine without looking whether it is there. It holds LoRA layers.
_LORA_LAYERS = "megatron.bridge.peft.lora_layers"


def read_provider(config: Mapping[str, Any]) -> Any:
    """Return Bridge's provider for a parsed config.json: a TransformerConfig that builds models."""
    auto_bridge = _import_bridge().AutoBridge
    with without_reports():
        published, settings = _borrow_bridge(AutoConfig.for_model(**config))
        published.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[published.model_type]]
        provider = auto_bridge.from_hf_config(published).to_megatron_provider(load_weights=False)
    for name, value in settings.items():
        setattr(provider, name, value)
    return provider


def _borrow_bridge(published: Any) -> tuple[Any, Mapping[str, Any]]:
    """Return a config that Bridge knows, and settings in which the model differs from it.

    Bridge has none for Mixtral and Qwen2-MoE, whose layers are Qwen3-MoE's without norms of queries and keys.
    """
    match published.model_type:
        case Family.MIXTRAL:
            routing = {"num_experts": published.num_local_experts, "moe_intermediate_size": published.intermediate_size}
            changed, settings = {**routing, "norm_topk_prob": True}, {"qk_layernorm": False}
        case Family.QWEN2_MOE:
            biases = {"add_qkv_bias": published.qkv_bias}
            changed, settings = {}, {**biases, "qk_layernorm": False, "moe_shared_expert_gate": True}
        case _:
            return published, {}
    head_dim = getattr(published, "head_dim", None) or published.hidden_size // published.num_attention_heads
    values = {**published.to_dict(), **changed, "head_dim": head_dim, "model_type": Family.QWEN3_MOE.value}
    values.pop("num_local_experts", None)
    return AutoConfig.for_model(**values), settings


def _import_bridge() -> ModuleType:
    if find_spec("megatron.bridge") is None:
        raise BadConfiguration(
            "model.implementation Megatron needs Megatron-Bridge, which this image or environment lacks; install "
            "moejob-trainer[megatron], or use Native"
        )
    with without_reports():
        # Found first: Core looks for Transformer Engine when it is imported, and must not find the stand-in.
        import_module("megatron.core.models.gpt.gpt_model")
        if find_spec("transformer_engine") is None:
            sys.modules.setdefault(_LORA_LAYERS, _UnusedLayers(_LORA_LAYERS))
        return import_module("megatron.bridge")


@contextmanager
def without_reports() -> Iterator[None]:
    """Keep reports on packages that are not installed out of the log of each rank, and that log as it is."""
    disabled, level, handlers = logging.root.manager.disable, logging.root.level, [*logging.root.handlers]
    logging.disable(logging.WARNING)
    try:
        yield
    finally:
        logging.disable(disabled)
        logging.root.setLevel(level)
        logging.root.handlers[:] = handlers


class _UnusedLayers(ModuleType):
    """A module that has any layer by name, each of which is never built."""

    def __getattr__(self, name: str) -> type[nn.Module]:
        if name.startswith("__"):
            raise AttributeError(name)
        return type(name, (nn.Module,), {})
