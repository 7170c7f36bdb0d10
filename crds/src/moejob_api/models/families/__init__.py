"""From a parsed config.json to the shape of a model: one function for each family, chosen by model_type.

What a key means, and what a missing one means, follows the config classes of Transformers, for it builds the model
that is trained. Keys that say how large the model is are required all the same: a default there would silently plan
another model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from moejob_api.models.families.deepseek import deepseek_v2_shape, deepseek_v3_shape, glm4_moe_lite_shape
from moejob_api.models.families.dense import llama_shape, qwen2_shape, qwen3_shape
from moejob_api.models.families.keys import refuse_unknown_meanings
from moejob_api.models.families.mixture_of_experts import (
    ernie4_5_moe_shape,
    glm4_moe_shape,
    gpt_oss_shape,
    minimax_m2_shape,
    mixtral_shape,
    olmoe_shape,
    qwen2_moe_shape,
    qwen3_5_moe_shape,
    qwen3_moe_shape,
    qwen3_next_shape,
)
from moejob_api.models.families.refused import REFUSED_MODELS
from moejob_api.models.families.rotary import refuse_unknown_rotary
from moejob_api.models.reader import ConfigReader, model_error, shown_value
from moejob_api.models.shape import Family, ModelShape
from moejob_api.problems import InvalidSpec, Rule

_READERS: Mapping[Family, Callable[[ConfigReader], ModelShape]] = {
    Family.LLAMA: llama_shape,
    Family.QWEN2: qwen2_shape,
    Family.QWEN3: qwen3_shape,
    Family.MIXTRAL: mixtral_shape,
    Family.QWEN2_MOE: qwen2_moe_shape,
    Family.QWEN3_MOE: qwen3_moe_shape,
    Family.QWEN3_NEXT: qwen3_next_shape,
    Family.QWEN3_5_MOE: qwen3_5_moe_shape,
    Family.DEEPSEEK_V2: deepseek_v2_shape,
    Family.DEEPSEEK_V3: deepseek_v3_shape,
    Family.GLM4_MOE: glm4_moe_shape,
    Family.GLM4_MOE_LITE: glm4_moe_lite_shape,
    Family.OLMOE: olmoe_shape,
    Family.ERNIE4_5_MOE: ernie4_5_moe_shape,
    Family.MINIMAX_M2: minimax_m2_shape,
    Family.GPT_OSS: gpt_oss_shape,
}
# Names that Transformers has no code for, and whose layers and tensors are those of a family, by their authors' word.
READ_AS: Mapping[str, Family] = {"kimi_k2": Family.DEEPSEEK_V3}
# Models that read images too: the family of the part that reads text, whose config is their text_config.
TEXT_PARTS: Mapping[str, Family] = {"qwen3_5_moe": Family.QWEN3_5_MOE}
# Keys that a model of several parts says for all of them.
_OF_ALL_PARTS = ("quantization_config", "compression_config")


def known_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the config of a model's text under the model_type by which Transformers has code for its layers."""
    name, text = str(config.get("model_type")), config.get("text_config")
    if name in TEXT_PARTS and isinstance(text, Mapping):
        of_all = {key: config[key] for key in _OF_ALL_PARTS if key in config}
        return {**text, **of_all, "model_type": TEXT_PARTS[name].value}
    family = READ_AS.get(name)
    return config if family is None else {**config, "model_type": family.value}


def shape_of(config: object, origin: str = "config.json") -> ModelShape:
    """The shape that a parsed config.json describes; InvalidSpec, beginning with `origin`, when it describes none."""
    if not isinstance(config, Mapping):
        raise model_error(Rule.MODEL_CONFIG, f"{origin} holds {shown_value(config)}; expected a JSON object")
    _refuse_split_text(config, origin)
    config = known_config(config)
    name = config.get("model_type")
    if isinstance(name, str) and name in REFUSED_MODELS:
        raise _unsupported_error(f"{origin}: {REFUSED_MODELS[name]}")
    if config.get("text_config") is not None or config.get("vision_config") is not None:
        raise _unsupported_error(
            f"{origin}: model_type {shown_value(name)} reads more than text, and only text is trained"
        )
    if not isinstance(name, str):
        raise model_error(
            Rule.MODEL_CONFIG, f"{origin}: model_type is {shown_value(name)}; expected one of {_supported_families()}"
        )
    if name not in _READERS:
        raise _unsupported_error(f"{origin}: model_type {shown_value(name)} is not supported")
    reader = ConfigReader(config, origin)
    shape = _READERS[Family(name)](reader)
    refuse_unknown_meanings(reader, shape.family)
    refuse_unknown_rotary(reader, shape)
    return shape


def _refuse_split_text(config: Mapping[str, Any], origin: str) -> None:
    """Refuse a model of several parts whose text is not where it should be, or not the model's."""
    name, text, classes = str(config.get("model_type")), config.get("text_config"), config.get("architectures")
    if name not in TEXT_PARTS:
        return
    if not isinstance(text, Mapping):
        raise model_error(
            Rule.MODEL_CONFIG, f"{origin}: text_config is {shown_value(text)}; expected an object with the text's sizes"
        )
    if text.get("tie_word_embeddings", False) != config.get("tie_word_embeddings", False):
        raise model_error(
            Rule.MODEL_CONFIG,
            f"{origin}: tie_word_embeddings is {shown_value(config.get('tie_word_embeddings', False))}, and "
            f"{shown_value(text.get('tie_word_embeddings', False))} in text_config; make both say the same",
        )
    if classes is not None and not (isinstance(classes, list) and any(map(_predicts_tokens, classes))):
        raise model_error(
            Rule.MODEL_CONFIG,
            f"{origin}: architectures is {shown_value(classes)}; expected a class ...ForConditionalGeneration",
        )


def _predicts_tokens(name: object) -> bool:
    return str(name).endswith("ForConditionalGeneration")


def _unsupported_error(reason: str) -> InvalidSpec:
    return model_error(
        Rule.MODEL_FAMILY,
        f"{reason}; use a model whose model_type is one of {_supported_families()}, or add it as docs/add-a-model.md "
        "says",
    )


def _supported_families() -> str:
    return ", ".join([*Family, *READ_AS, *TEXT_PARTS])
