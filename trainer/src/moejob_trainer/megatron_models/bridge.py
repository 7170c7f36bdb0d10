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

from moejob_trainer.errors import BadConfiguration

# The one module of Bridge that imports Transformer Engine without looking whether it is there. It holds LoRA layers.
_LORA_LAYERS = "megatron.bridge.peft.lora_layers"


def read_provider(config: Mapping[str, Any]) -> Any:
    """Return Bridge's provider for a parsed config.json: a TransformerConfig that builds models."""
    auto_bridge = _import_bridge().AutoBridge
    with without_reports():
        published = AutoConfig.for_model(**config)
        published.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[published.model_type]]
        return auto_bridge.from_hf_config(published).to_megatron_provider(load_weights=False)


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
