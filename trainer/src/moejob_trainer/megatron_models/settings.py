"""The settings of Megatron's layers: Bridge's for the model, the job's for layout and types, `model.transformer`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from difflib import get_close_matches
from typing import Any, get_type_hints

import torch
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout
from megatron.core.transformer.transformer_config import TransformerConfig
from pydantic import TypeAdapter, ValidationError

from moejob_api.job.job import Spec
from moejob_api.job.training import RecomputeGranularity, RecomputeMethod
from moejob_api.layout.sizes import Layout
from moejob_api.layout.stages import pipeline_stages
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.layers.rotary import Rotary, YarnScaling
from moejob_trainer.layers.routing import Scoring
from moejob_trainer.megatron_models.bridge import read_provider
from moejob_trainer.model.architecture import Architecture
from moejob_trainer.model.parameters import padded_vocabulary

# The scores that DeepSeek's and GLM's own code adds up to rank a group of experts.
_GROUP_SCORES = 2
# Megatron's own kernels for these need Transformer Engine, Apex or a GPU; a job may turn on what its image has.
_WITHOUT_FUSIONS: Mapping[str, Any] = {
    "apply_rope_fusion": False,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "cross_entropy_loss_fusion": False,
    "masked_softmax_fusion": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "moe_shared_expert_overlap": False,
}
# The loss, gradients, norms and attention are ours, and the model is without dropout, MTP and losses of balance.
_OURS: Mapping[str, Any] = {
    "attention_dropout": 0.0,
    "cpu_offloading": False,
    "fp16": False,
    "fp4": None,
    "fp8": None,
    "gradient_accumulation_fusion": False,
    "hidden_dropout": 0.0,
    "make_vocab_size_divisible_by": 1,
    "moe_aux_loss_coeff": 0.0,
    "moe_grouped_gemm": True,
    "moe_router_load_balancing_type": "none",
    "moe_token_dispatcher_type": "alltoall",
    "moe_z_loss_coeff": None,
    "mtp_num_layers": None,
    "perform_initialization": False,
    "persist_layer_norm": False,
    "should_pad_vocab": False,
    "softmax_type": "vanilla",
    "transformer_impl": "local",
    "window_size": None,
}


def make_provider(
    config: Mapping[str, Any], model: Architecture, spec: Spec, layout: Layout, device: torch.device
) -> Any:
    """Return the provider of a job's model, which Megatron has checked."""
    provider = read_provider(config)
    of_job = {
        **_OURS,
        **_layout_settings(spec, layout, len(model.shape.layers)),
        **_recompute_settings(spec),
        **_type_settings(spec),
    }
    of_job["share_embeddings_and_output_weights"] = model.shape.tied_embeddings
    of_job |= {"vocab_size": padded_vocabulary(model.shape), "use_cpu_initialization": device.type == "cpu"}
    of_job |= {**_expert_settings(model), **_rotary_settings(model.rotary)}
    chosen = read_overrides(spec.model.transformer or {}, frozenset(of_job))
    for name, value in {**_WITHOUT_FUSIONS, **of_job, **chosen}.items():
        setattr(provider, name, value)
    try:
        provider.finalize()
    except (AssertionError, ValueError) as error:
        raise BadConfiguration(f"Megatron refuses the settings of this model: {error}") from error
    _check_numbers(provider, model)
    return provider


def _rotary_settings(rotary: Rotary) -> Mapping[str, Any]:
    # Bridge has theta of the published ERNIE-4.5 and YaRN of the published gpt-oss, whatever a config says.
    settings: dict[str, Any] = {"rotary_base": rotary.theta, "position_embedding_type": "rope"}
    scaling = rotary.scaling
    if not isinstance(scaling, YarnScaling):
        return settings | {"yarn_rotary_scaling_factor": None}
    if scaling.attention_factor is not None:
        raise BadConfiguration(
            f"Megatron scales attention by YaRN's factor alone, this model by {scaling.attention_factor}; use Native"
        )
    # What it scales queries and keys by; their angles are ours.
    return settings | {
        "yarn_rotary_scaling_factor": scaling.factor,
        "yarn_mscale": scaling.mscale or None,
        "yarn_mscale_all_dim": scaling.mscale_all_dim or None,
    }


def _expert_settings(model: Architecture) -> Mapping[str, Any]:
    experts, routing = model.shape.experts, model.routing
    if experts is None or routing is None:
        # Megatron refuses to divide experts that a model does not have. Each rank of the group has the whole layer.
        return {"expert_model_parallel_size": 1}
    # Bridge gives GLM-4.5 one shared expert, whatever its config says.
    settings: dict[str, Any] = {"moe_shared_expert_intermediate_size": experts.shared_intermediate or None}
    if routing.scoring is Scoring.SOFTMAX:
        # Bridge gives OLMoE weights that are not divided by their sum, whatever norm_topk_prob says.
        settings["moe_router_pre_softmax"] = not routing.renormalized
        # Bridge gives ERNIE-4.5 sigmoid scores, beside which alone Megatron has a bias; `BiasedSoftmaxRouter` has one.
        settings |= {"moe_router_score_function": "softmax", "moe_router_enable_expert_bias": False}
    return settings


def _check_numbers(provider: Any, model: Architecture) -> None:
    """Compare Bridge's reading of config.json, and what overrides made of it, with our own: both miss some keys."""
    numbers: dict[str, Any] = {"layernorm_epsilon": model.norm_epsilon, "num_layers": len(model.shape.layers)}
    numbers["rotary_interleaved"] = model.rotary.interleaved
    if (routing := model.routing) is not None:
        numbers |= {
            "num_moe_experts": routing.experts,
            "moe_router_topk": routing.per_token,
            "moe_router_score_function": "sigmoid" if routing.scoring is Scoring.SIGMOID else "softmax",
            "moe_router_topk_scaling_factor": routing.scale,
        }
        if routing.groups > 1 and routing.per_token // routing.kept_groups != _GROUP_SCORES:
            raise BadConfiguration(
                f"Megatron ranks a group of experts by its best {routing.per_token // routing.kept_groups}, where "
                f"the model's own code takes {_GROUP_SCORES}; set model.implementation to Native"
            )
        if routing.scoring is Scoring.SIGMOID and not routing.renormalized:
            raise BadConfiguration("Megatron divides sigmoid scores by their sum, this model does not; use Native")
    for name, expected in numbers.items():
        actual = getattr(provider, name)
        if (1.0 if actual is None else actual) != expected:
            raise BadConfiguration(
                f"Megatron would compute with {name} {actual}, where config.json says {expected}; remove it from "
                "model.transformer, or set model.implementation to Native"
            )


def read_overrides(texts: Mapping[str, str], taken: frozenset[str]) -> Mapping[str, Any]:
    """Return `model.transformer` in the types of the installed Megatron; BadConfiguration for what cannot be set."""
    types = get_type_hints(TransformerConfig)
    hints = {field.name: types[field.name] for field in fields(TransformerConfig)}
    return {name: _read_override(name, text, hints, taken) for name, text in texts.items()}


def _read_override(name: str, text: str, hints: Mapping[str, Any], taken: frozenset[str]) -> Any:
    if name not in hints:
        nearest = get_close_matches(name, hints, n=1, cutoff=0.0)[0]
        raise BadConfiguration(
            f"model.transformer.{name}: TransformerConfig of the installed Megatron has no such key; use {nearest}"
        )
    if name in taken:
        raise BadConfiguration(f"model.transformer.{name}: other fields of the job, or modules of ours, decide it")
    try:
        adapter = TypeAdapter(hints[name])
        return adapter.validate_python(None) if text == "null" else adapter.validate_strings(text)
    except (ValidationError, TypeError) as error:
        raise BadConfiguration(f"model.transformer.{name}: {text!r} is no {hints[name]}") from error


def _layout_settings(spec: Spec, layout: Layout, layers: int) -> Mapping[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "expert_tensor_parallel_size": layout.expert_tensor,
        "sequence_parallel": layout.sequence_parallel,
        "pipeline_model_parallel_layout": None if layout.pipeline == 1 else _stage_layout(spec, layers),
    }


def _stage_layout(spec: Spec, layers: int) -> PipelineParallelLayerLayout:
    """Return the chunks in the order of the model: chunk 0 of every stage, then chunk 1 of every stage."""
    stages = pipeline_stages(spec.parallelism, layers)
    if stages is None:
        raise ValueError(f"{layers} layers do not divide over {spec.parallelism.pipeline} stages")
    rounds = zip(*(stage.chunks for stage in stages), strict=True)
    chunks = [["decoder"] * len(chunk) for chunks in rounds for chunk in chunks]
    chunks[0].insert(0, "embedding")
    chunks[-1].append("loss")
    return PipelineParallelLayerLayout(chunks, spec.parallelism.pipeline)


def _recompute_settings(spec: Spec) -> Mapping[str, Any]:
    recompute = spec.training.recompute
    if recompute.granularity is RecomputeGranularity.NONE:
        return {"recompute_granularity": None, "recompute_method": None, "recompute_num_layers": None}
    method = recompute.method or RecomputeMethod.UNIFORM
    return {
        "recompute_granularity": "full",
        "recompute_method": method.value.lower(),
        "recompute_num_layers": recompute.layers or 1,
    }


def _type_settings(spec: Spec) -> Mapping[str, Any]:
    dtype = getattr(torch, spec.model.dtype.value)
    return {
        "bf16": dtype is torch.bfloat16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "autocast_dtype": dtype,
        "moe_router_dtype": {"float32": "fp32", "float64": "fp64"}[spec.moe.router_dtype.value],
    }
