"""The settings of a `GPTModel` out of a published config, as Megatron-Bridge reads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from moejob_trainer.errors import BadConfiguration
from moejob_trainer.interchange.bridge_import import has_bridge, import_auto_bridge, without_reports


def read_provider(config: Mapping[str, Any]) -> Any:
    """Return Bridge's provider for a parsed config.json: a TransformerConfig that builds models."""
    if not has_bridge():
        raise BadConfiguration(
            "model.implementation Megatron needs Megatron-Bridge, which this image or environment lacks; install "
            "moejob-trainer[megatron], or use Native"
        )
    auto_bridge = import_auto_bridge()
    with without_reports():
        published = AutoConfig.for_model(**config)
        published.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[published.model_type]]
        return auto_bridge.from_hf_config(published).to_megatron_provider(load_weights=False)
