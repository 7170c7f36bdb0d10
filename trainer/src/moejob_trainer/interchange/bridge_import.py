"""The import of Megatron-Bridge without Transformer Engine, and with the families that it lacks."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from torch import nn

from moejob_trainer.interchange.further_bridges import register_bridges

# The one module of Bridge that imports Transformer Engine without looking whether it is there. It holds LoRA layers.
_LORA_LAYERS = "megatron.bridge.peft.lora_layers"


def has_bridge() -> bool:
    """Return whether Megatron-Bridge is installed."""
    return find_spec("megatron.bridge") is not None


def import_auto_bridge() -> Any:
    """Return Megatron-Bridge's AutoBridge class."""
    with without_reports():
        # Found first: Core looks for Transformer Engine when it is imported, and must not find the stand-in.
        import_module("megatron.core.models.gpt.gpt_model")
        if find_spec("transformer_engine") is None:
            sys.modules.setdefault(_LORA_LAYERS, _UnusedLayers(_LORA_LAYERS))
        auto_bridge = import_module("megatron.bridge").AutoBridge
        register_bridges()
    return auto_bridge


@contextmanager
def without_reports() -> Iterator[None]:
    """Keep reports on packages that are not installed out of the log, and the log as it is."""
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
