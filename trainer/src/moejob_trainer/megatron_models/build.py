"""The stages of this rank out of Megatron's models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from megatron.core.enums import ModelType
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules, get_mlp_module_spec_for_backend
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer

from moejob_api.job.job import Spec
from moejob_api.layout.sizes import Layout
from moejob_api.models.shape import Experts, GroupedAttention, Layer, ModelShape
from moejob_trainer.distributed.groups import Group
from moejob_trainer.interchange.bridge_import import without_reports
from moejob_trainer.megatron.stages import schedule_config, stage_places
from moejob_trainer.megatron.training_engine import TrainingPlacement
from moejob_trainer.megatron_models.cpu import use_cpu_models
from moejob_trainer.megatron_models.modules import (
    BiasedSoftmaxRouter,
    DocumentAttention,
    LayerModules,
    make_heads_norm,
    make_norm,
)
from moejob_trainer.megatron_models.settings import make_provider
from moejob_trainer.megatron_models.stage import MegatronStage, mark_parameters
from moejob_trainer.model.architecture import Architecture
from moejob_trainer.model.parameters import model_parameters
from moejob_trainer.model.stage import ModelStage, StagePlace


def build_megatron_stages(
    config: Mapping[str, Any], model: Architecture, spec: Spec, layout: Layout, placement: TrainingPlacement
) -> list[ModelStage]:
    """Build the stages of this rank, one unless the schedule is interleaved; weights are undefined."""
    groups, device = placement.groups, placement.device
    if device.type == "cpu":
        use_cpu_models()
    provider = make_provider(config, model, spec, layout, device)
    provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()  # noqa: SLF001 how Bridge itself sets it
    # Under sequence parallelism Megatron sets its own generator around layers, though nothing here draws from it.
    model_parallel_cuda_manual_seed(spec.training.seed)
    schedule = schedule_config(model, layout, getattr(torch, spec.model.dtype.value))
    declared = {parameter.name: parameter for parameter in model_parameters(model.shape)}
    stages: list[ModelStage] = []
    for number, place in enumerate(stage_places(model, spec, groups)):
        provider.transformer_layer_spec = _block_spec(model.shape, place, groups.tensor)
        # The device is for modules of ours; Megatron's know it.
        with without_reports(), device:
            gpt = provider.provide(place.is_first, place.is_last, number if layout.virtual_pipeline > 1 else None)
        stage = MegatronStage(gpt, model, spec, groups, place)
        if [index for index, _ in stage.numbered_layers()] != [*place.layers]:
            raise RuntimeError(f"Megatron built other layers than {place.layers}; report this")
        mark_parameters(stage, declared)
        stage.config, stage.model_type = schedule, ModelType.encoder_or_decoder
        stages.append(stage)
    return stages


def _block_spec(shape: ModelShape, place: StagePlace, tensor: Group) -> Callable[[Any], TransformerBlockSubmodules]:
    """Return the maker of a chunk's layers; which of them have experts is a fact of the model, not of the provider.

    A function and no partial: Megatron copies the provider deeply, and a group of processes cannot be copied.
    """

    def make_block_spec(provider: Any) -> TransformerBlockSubmodules:
        layer_specs = [_layer_spec(provider, shape.layers[index], tensor) for index in place.layers]
        return TransformerBlockSubmodules(layer_specs=layer_specs, layer_norm=make_norm)

    return make_block_spec


def _layer_spec(provider: Any, layer: Layer, tensor: Group) -> ModuleSpec:
    submodules = deepcopy(get_gpt_layer_local_submodules(qk_layernorm=provider.qk_layernorm, normalization="RMSNorm"))
    submodules.input_layernorm = submodules.pre_mlp_layernorm = make_norm
    _set_attention(submodules.self_attention.submodules, layer, tensor)
    experts = layer.mlp if isinstance(layer.mlp, Experts) else None
    submodules.mlp = get_mlp_module_spec_for_backend(
        LayerModules(), num_experts=None if experts is None else experts.count, moe_grouped_gemm=experts is not None
    )
    if experts is not None and experts.selection_bias and provider.moe_router_score_function == "softmax":
        submodules.mlp.keywords["submodules"].router = BiasedSoftmaxRouter
    return ModuleSpec(module=TransformerLayer, submodules=submodules)


def _set_attention(modules: Any, layer: Layer, tensor: Group) -> None:
    attention = layer.attention
    if not isinstance(attention, GroupedAttention):
        raise TypeError(f"{attention} has no module in Megatron's layers")
    sinks = attention.heads // tensor.size if attention.sinks else 0
    modules.core_attention = partial(DocumentAttention, window=attention.window, sinks=sinks)
    if attention.head_norm:
        modules.q_layernorm = modules.k_layernorm = make_norm
    if attention.joint_norm:
        modules.q_layernorm = partial(make_heads_norm, heads=attention.heads, group=tensor)
        modules.k_layernorm = partial(make_heads_norm, heads=attention.key_value_heads, group=tensor)
