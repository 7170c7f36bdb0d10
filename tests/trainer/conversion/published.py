"""Small checkpoints as they are published: every weight random, no two alike, saved by Transformers itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from model_configs import config
from moejob_api.models.families import shape_of
from moejob_api.models.shape import Family
from moejob_trainer.conversion.families import ROWS, TensorTable, build_tensor_table
from moejob_trainer.model.parameters import Coordinates, local_shape, local_slices

FAMILIES = list(ROWS)
_LAYERS = 3


def values_of(family: Family, **changes: Any) -> dict[str, Any]:
    """A small config whose heads and widths four ranks divide; MTP only where it is asked for."""
    sizes = {"num_hidden_layers": _LAYERS, "hidden_size": 32, "num_attention_heads": 8, "intermediate_size": 16}
    experts = {"moe_intermediate_size": 20, "n_group": 2, "topk_group": 1, "num_nextn_predict_layers": 0}
    # The class of DeepSeek-V3 would put in 128 for what is missing, whatever the number of heads.
    heads = {"num_key_value_heads": 8} if family in {Family.DEEPSEEK_V3, Family.GLM4_MOE_LITE} else {}
    if family in {Family.QWEN3_NEXT, Family.QWEN3_5_MOE}:
        heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 12, "full_attention_interval": 2}
    return config(family, **sizes | experts | heads | changes)


def table_of(values: dict[str, Any]) -> TensorTable:
    return build_tensor_table(shape_of(values))


def random_model(values: dict[str, Any], dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of a config with every parameter and buffer of its own random numbers."""
    others = {key: value for key, value in values.items() if key != "model_type"}
    model: PreTrainedModel = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(values["model_type"], **others), dtype=dtype
    )
    generator = torch.Generator().manual_seed(7)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.copy_(torch.randn(tensor.shape, generator=generator))
    return model


def save_published(folder: Path, values: dict[str, Any], *, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    """A folder that save_pretrained wrote."""
    random_model(values, dtype).save_pretrained(folder, **options)
    return folder


def saved_with_mtp(folder: Path, values: dict[str, Any]) -> Path:
    """The same with one MTP module, in the way DeepSeek publishes it: one more layer, and what is special about it."""
    save_published(
        folder, values | {"num_hidden_layers": values["num_hidden_layers"] + 1, "num_nextn_predict_layers": 0}
    )
    random_model(values).config.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file(tensors | _mtp(tensors, values), folder / "model.safetensors", {"format": "pt"})
    return folder


def _mtp(tensors: dict[str, Tensor], values: dict[str, Any]) -> dict[str, Tensor]:
    prefix, hidden = f"model.layers.{values['num_hidden_layers']}.", values["hidden_size"]
    return {
        f"{prefix}enorm.weight": torch.randn(hidden),
        f"{prefix}hnorm.weight": torch.randn(hidden),
        f"{prefix}eh_proj.weight": torch.randn(hidden, 2 * hidden),
        f"{prefix}shared_head.norm.weight": torch.randn(hidden),
        f"{prefix}embed_tokens.weight": tensors["model.embed_tokens.weight"].clone(),
        f"{prefix}shared_head.head.weight": tensors["lm_head.weight"].clone(),
    }


def blank(table: TensorTable, place: Coordinates, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    """Return a rank's tensors before the import: nothing that an import could leave behind unseen."""
    return {
        parameter.name: torch.full(
            local_shape(parameter, place), torch.nan, dtype=torch.float32 if parameter.is_buffer else dtype
        )
        for parameter in table.parameters
    }


def cut(table: TensorTable, whole: dict[str, Tensor], place: Coordinates) -> dict[str, Tensor]:
    """A rank's part of a whole model."""
    return {parameter.name: whole[parameter.name][local_slices(parameter, place)] for parameter in table.parameters}
