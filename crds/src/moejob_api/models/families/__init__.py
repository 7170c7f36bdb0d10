"""From a parsed config.json to the shape of a model: one function for each family, chosen by model_type.

What a key means, and what a missing one means, follows the config classes of Transformers, for it builds the model
that is trained. Keys that say how large the model is are required all the same: a default there would silently plan
another model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from moejob_api.models.families.deepseek import deepseek_v2, deepseek_v3
from moejob_api.models.families.dense import llama, qwen2, qwen3
from moejob_api.models.families.mixtures import glm4_moe, gpt_oss, mixtral, qwen2_moe, qwen3_moe, qwen3_next
from moejob_api.models.reader import ConfigReader, refused, shown
from moejob_api.models.shape import Family, ModelShape
from moejob_api.problems import InvalidSpec, Rule

_READERS: Mapping[str, Callable[[ConfigReader], ModelShape]] = {
    Family.LLAMA: llama,
    Family.QWEN2: qwen2,
    Family.QWEN3: qwen3,
    Family.MIXTRAL: mixtral,
    Family.QWEN2_MOE: qwen2_moe,
    Family.QWEN3_MOE: qwen3_moe,
    Family.QWEN3_NEXT: qwen3_next,
    Family.DEEPSEEK_V2: deepseek_v2,
    Family.DEEPSEEK_V3: deepseek_v3,
    # Kimi-K2 is DeepSeek-V3 with other numbers.
    "kimi_k2": deepseek_v3,
    Family.GLM4_MOE: glm4_moe,
    Family.GPT_OSS: gpt_oss,
}


def shape_of(config: object, origin: str = "config.json") -> ModelShape:
    """The shape that a parsed config.json describes; InvalidSpec, beginning with `origin`, when it describes none."""
    if not isinstance(config, Mapping):
        raise refused(Rule.MODEL_CONFIG, f"{origin} holds {shown(config)}; expected a JSON object")
    if config.get("text_config") is not None:
        raise _unsupported(f"{origin}: text_config says that this model reads more than text")
    name = config.get("model_type")
    if not isinstance(name, str):
        raise refused(Rule.MODEL_CONFIG, f"{origin}: model_type is {shown(name)}; expected one of {_known()}")
    read = _READERS.get(name)
    if read is None:
        raise _unsupported(f"{origin}: model_type {shown(name)} is not supported")
    return read(ConfigReader(config, origin))


def _unsupported(what: str) -> InvalidSpec:
    return refused(Rule.MODEL_FAMILY, f"{what}; use a model whose model_type is one of {_known()}")


def _known() -> str:
    return ", ".join(_READERS)
