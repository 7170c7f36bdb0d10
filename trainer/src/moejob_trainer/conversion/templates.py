"""The files beside exported weights: a config.json of the trained model, and unchanged tokenizer files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import torch

from moejob_api.models.families import shape_of
from moejob_api.models.shape import DenseMLP, Family, ModelShape
from moejob_trainer.data.links import copy_file
from moejob_trainer.runtime.disk import Disk

CONFIG_FILE = "config.json"
# Transformers computes nothing else for these families, and drops the keys from files that it writes. vLLM needs them:
# it has no room for the bias of the router without the first, and takes a softmax of the scores without the second.
_ROUTING: Mapping[Family, Mapping[str, object]] = {
    Family.DEEPSEEK_V3: {"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
    Family.MINIMAX_M2: {"use_routing_bias": True, "scoring_func": "sigmoid"},
}
_AS_THEY_WERE = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.*",
    "merges.txt",
    "*.tiktoken",
    "tiktoken.model",
    "chat_template*",
    "*processor_config.json",
    "additional_chat_templates/*.jinja",
    "*.py",
    "LICENSE*",
)


def copy_config_and_tokenizer(template: Path, folder: Path, shape: ModelShape, dtype: torch.dtype) -> None:
    """Put config and tokenizer beside weights of this shape and type."""
    files = {path for pattern in _AS_THEY_WERE for path in template.glob(pattern) if path.is_file()}
    for path in sorted(files):
        target = folder / path.relative_to(template)
        target.parent.mkdir(exist_ok=True)
        copy_file(path, target, template)
    text = (template / CONFIG_FILE).read_text(encoding="utf-8")
    Disk().write(folder / CONFIG_FILE, exported_config(text, shape, dtype).encode())


def exported_config(text: str, shape: ModelShape, dtype: torch.dtype) -> str:
    """Return a config.json that describes these weights: the published text where it already does."""
    published_config = json.loads(text)
    changed_config = _updated_config(published_config, shape, dtype)
    if shape_of(changed_config) != shape:
        raise ValueError(f"the {CONFIG_FILE} to export with describes another model than the one that was trained")
    return (
        text if changed_config == published_config else json.dumps(changed_config, indent=2, ensure_ascii=False) + "\n"
    )


def _updated_config(published_config: dict[str, object], shape: ModelShape, dtype: torch.dtype) -> dict[str, object]:
    key = "torch_dtype" if "torch_dtype" in published_config else "dtype"
    changed_config = published_config | {key: str(dtype).removeprefix("torch.")}
    # Weights are written in the type they are trained in, even if they were published quantized.
    changed_config.pop("quantization_config", None)
    text = changed_config.get("text_config")
    if isinstance(text, dict) and key in text:
        changed_config["text_config"] = text | {key: changed_config[key]}
    if not shape.mtp_layers and shape_of(changed_config).mtp_layers:
        changed_config["num_nextn_predict_layers"] = 0
    routing = _ROUTING.get(shape.family, {})
    changed_config |= {key: changed_config.get(key) or value for key, value in routing.items()}
    if shape.family is Family.ERNIE4_5_MOE and "num_nextn_predict_layers" in changed_config:
        changed_config["num_nextn_predict_layers"] = 0
    if shape.family is Family.GLM4_MOE_LITE:
        # vLLM reads this key, Transformers mlp_layer_types.
        changed_config["first_k_dense_replace"] = sum(isinstance(layer.mlp, DenseMLP) for layer in shape.layers)
    return changed_config
