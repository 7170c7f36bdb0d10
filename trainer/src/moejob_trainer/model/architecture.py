"""The architecture of a model: its shape, as planned with, and the numbers that only training needs.

Read from config.json through Transformers' own config classes, so that a missing key means here what it means there.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, PretrainedConfig

from moejob_api.derived import trained_shape
from moejob_api.job.job import Spec
from moejob_api.models.families import known_config, shape_of
from moejob_api.models.reader import model_error
from moejob_api.models.shape import Family, GroupedAttention, LatentAttention, ModelShape
from moejob_api.problems import Rule
from moejob_trainer.layers.rotary import (
    LinearScaling,
    Llama3Scaling,
    Rotary,
    Scaling,
    YarnScaling,
    yarn_mscale,
)
from moejob_trainer.layers.routing import Routing, Scoring


@dataclass(frozen=True, slots=True)
class Architecture:
    """A model as it is computed."""

    shape: ModelShape
    norm_epsilon: float
    rotary: Rotary
    # None without experts.
    routing: Routing | None
    attention_scale: float
    # gpt-oss clamps the gate and adds one to the other half.
    gate_limit: float | None = None
    # Qwen3-Next and Qwen3.5 keep the weights of their norms as their distance from one.
    zero_centred_norms: bool = False


def read_architecture(config: Mapping[str, Any], origin: str = "config.json") -> Architecture:
    """The architecture that a parsed config.json describes; InvalidSpec where it cannot be trained."""
    shape = shape_of(config, origin)
    hf_config = _read_hf_config(config, origin)
    return Architecture(
        shape=shape,
        norm_epsilon=hf_config.rms_norm_eps,
        rotary=_make_rotary(shape, hf_config),
        routing=_make_routing(shape, hf_config),
        attention_scale=_attention_scale(shape, hf_config),
        gate_limit=getattr(hf_config, "swiglu_limit", 7.0) if shape.family is Family.GPT_OSS else None,
        zero_centred_norms=shape.family in {Family.QWEN3_NEXT, Family.QWEN3_5_MOE},
    )


def _read_hf_config(config: Mapping[str, Any], origin: str) -> PretrainedConfig:
    """The config as Transformers reads it, with a value for every key of its family."""
    try:
        return AutoConfig.for_model(**known_config(config))
    except (StrictDataclassError, ValueError, TypeError, KeyError) as error:
        raise model_error(Rule.MODEL_CONFIG, f"{origin}: Transformers cannot read it: {error}") from error


def trained_architecture(model: Architecture, spec: Spec) -> Architecture:
    """The model without what a job does not train and does not need."""
    return replace(model, shape=trained_shape(model.shape, spec))


def _head_dim(shape: ModelShape, config: PretrainedConfig) -> int:
    for attention in shape.attention_kinds():
        if isinstance(attention, LatentAttention):
            return attention.nope_dim + attention.rope_dim
        if isinstance(attention, GroupedAttention):
            return attention.head_dim
    # A model of linear attention only: nothing is turned.
    head_dim: int = config.head_dim
    return head_dim


def _make_rotary(shape: ModelShape, config: PretrainedConfig) -> Rotary:
    parameters = config.rope_parameters
    return Rotary(
        dim=_rotary_dim(shape, config),
        theta=float(parameters["rope_theta"]),
        scaling=_make_scaling(parameters, config.max_position_embeddings),
        # DeepSeek-V2 and ERNIE turn neighbouring elements always, DeepSeek-V3 when its config says so.
        interleaved=shape.family in _INTERLEAVED or bool(getattr(config, "rope_interleave", False)),
    )


_INTERLEAVED = frozenset({Family.DEEPSEEK_V2, Family.ERNIE4_5_MOE})


def _rotary_dim(shape: ModelShape, config: PretrainedConfig) -> int:
    attention = next(shape.attention_kinds())
    if isinstance(attention, LatentAttention):
        return attention.rope_dim
    return int(_head_dim(shape, config) * config.rope_parameters.get("partial_rotary_factor", 1.0))


def _make_scaling(parameters: Mapping[str, Any], positions: int) -> Scaling | None:
    match parameters["rope_type"]:
        case "default":
            return None
        case "linear":
            return LinearScaling(parameters["factor"])
        case "llama3":
            return Llama3Scaling(
                factor=parameters["factor"],
                low_frequency_factor=parameters["low_freq_factor"],
                high_frequency_factor=parameters["high_freq_factor"],
                original_context=parameters["original_max_position_embeddings"],
            )
        case "yarn":
            return YarnScaling(
                factor=parameters["factor"],
                original_context=parameters.get("original_max_position_embeddings") or positions,
                beta_fast=parameters.get("beta_fast") or 32.0,
                beta_slow=parameters.get("beta_slow") or 1.0,
                mscale=parameters.get("mscale") or 0.0,
                mscale_all_dim=parameters.get("mscale_all_dim") or 0.0,
                attention_factor=parameters.get("attention_factor"),
                truncate=parameters.get("truncate", True),
            )
        case rope_type:
            # Ignored, it would train another model without an error.
            raise NotImplementedError(f"rope_type {rope_type}, which the gate refuses")


def _attention_scale(shape: ModelShape, config: PretrainedConfig) -> float:
    scale = float(_head_dim(shape, config) ** -0.5)
    parameters = config.rope_parameters
    if not isinstance(next(shape.attention_kinds()), LatentAttention) or parameters["rope_type"] == "default":
        return scale
    # For latent attention, what a longer context puts on logits is part of the scale.
    mscale = parameters.get("mscale_all_dim") or 0.0
    return scale * yarn_mscale(parameters["factor"], mscale) ** 2 if mscale else scale


# Families that divide scores by their sum, whatever a config says, and their scores.
_RENORMALIZED: Mapping[Family, Scoring] = {
    Family.MIXTRAL: Scoring.SOFTMAX,
    Family.QWEN3_5_MOE: Scoring.SOFTMAX,
    Family.ERNIE4_5_MOE: Scoring.SOFTMAX,
    Family.MINIMAX_M2: Scoring.SIGMOID,
}


def _make_routing(shape: ModelShape, config: PretrainedConfig) -> Routing | None:
    experts = shape.experts
    if experts is None:
        return None
    plain = Routing(experts.count, experts.per_token)
    match shape.family:
        case Family.MIXTRAL | Family.QWEN3_5_MOE | Family.ERNIE4_5_MOE | Family.MINIMAX_M2:
            return replace(plain, scoring=_RENORMALIZED[shape.family], renormalized=True)
        case Family.QWEN2_MOE | Family.QWEN3_MOE | Family.QWEN3_NEXT | Family.OLMOE:
            return replace(plain, renormalized=config.norm_topk_prob)
        case Family.GPT_OSS:
            return replace(plain, scoring=Scoring.SELECTED_SOFTMAX)
        case Family.DEEPSEEK_V2:
            plain = replace(plain, scale=config.routed_scaling_factor)
            if config.topk_method != "group_limited_greedy":
                return plain
            return replace(plain, groups=config.n_group, kept_groups=config.topk_group)
        case Family.DEEPSEEK_V3 | Family.GLM4_MOE | Family.GLM4_MOE_LITE:
            return replace(
                plain,
                scoring=Scoring.SIGMOID,
                renormalized=config.norm_topk_prob,
                groups=config.n_group,
                kept_groups=config.topk_group,
                scale=config.routed_scaling_factor,
            )
        case _:
            raise NotImplementedError(f"{shape.family} has no rule for choosing experts")
