"""The stages of this rank, and their configuration for Megatron's schedules."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from megatron.core.enums import ModelType
from megatron.core.model_parallel_config import ModelParallelConfig

from moejob_api.derived import has_float8_products, has_replica_reads, has_shared_roundings, share_dtype, update_batch
from moejob_api.job.job import Spec
from moejob_api.job.moe import Sharding
from moejob_api.layout.sizes import Layout
from moejob_api.layout.stages import pipeline_stages as stages_of
from moejob_api.planner.memory.case import prepare_case
from moejob_api.planner.memory.communication import peer_memory_bytes
from moejob_api.planner.memory.microbatch_share import microbatch_share
from moejob_api.planner.memory.whole_layers import count_whole_layers
from moejob_trainer.distributed.groups import Groups
from moejob_trainer.distributed.peer_mapping import FOR_TOKENS, map_peer_memory
from moejob_trainer.distributed.peer_memory import PeerMemory
from moejob_trainer.megatron.sharding import fully_shard_stage, keep_beside_experts, keep_gathered, weight_types
from moejob_trainer.model.architecture import Architecture
from moejob_trainer.model.float8 import use_float8
from moejob_trainer.model.stage import Stage, StagePlace


@dataclass
class ScheduleConfig(ModelParallelConfig):
    """The settings that Megatron's schedules and buffers read, beside those of all its models."""

    hidden_size: int = 0
    # Gradients are sums: the loss is divided by its global weight before the backward pass.
    calculate_per_token_loss: bool = True
    fine_grained_activation_offloading: bool = False
    fp8: None = None
    fp4: None = None


def build_stages(model: Architecture, spec: Spec, layout: Layout, groups: Groups, device: torch.device) -> list[Stage]:
    """Build the stages of this rank, one unless the schedule is interleaved; weights are undefined."""
    dtype = getattr(torch, spec.model.dtype.value)
    schedule = schedule_config(model, layout, dtype)
    groups = replace(groups, expert_memory=_map_expert_memory(model, spec, layout, groups, device))
    stages = []
    for place in stage_places(model, spec, groups):
        stage = _make_stage(partial(Stage, model, spec, groups, place), spec, groups, device)
        if has_float8_products(spec):
            use_float8(stage, keeps=has_shared_roundings(spec, layout))
        if spec.memory.sharding is Sharding.ZERO2:
            keep_gathered(stage)
        if spec.memory.sharding is Sharding.FSDP:
            keep_beside_experts(stage, count_whole_layers(prepare_case(spec, model.shape, layout)))
        stage.config, stage.model_type = schedule, ModelType.encoder_or_decoder
        stages.append(stage)
    return stages


def stage_places(model: Architecture, spec: Spec, groups: Groups) -> list[StagePlace]:
    """Return the layers that this rank holds, chunk by chunk."""
    stages = stages_of(spec.parallelism, len(model.shape.layers))
    if stages is None:
        raise ValueError(f"{len(model.shape.layers)} layers do not divide over {spec.parallelism.pipeline} stages")
    pipeline_rank, last = groups.pipeline.rank, groups.pipeline.size - 1
    chunks = stages[pipeline_rank].chunks
    return [
        StagePlace(
            layers=layers,
            is_first=pipeline_rank == 0 and index == 0,
            is_last=pipeline_rank == last and index == len(chunks) - 1,
        )
        for index, layers in enumerate(chunks)
    ]


def _map_expert_memory(
    model: Architecture, spec: Spec, layout: Layout, groups: Groups, device: torch.device
) -> PeerMemory | None:
    """Map the memory through which layers exchange tokens; None without dispatcher Flex or peers in reach."""
    rank_share = microbatch_share(spec, model.shape, layout, update_batch(spec, layout).micro_tokens)
    writers = groups.expert if groups.expert_across.size == 1 else groups.expert_inside
    return map_peer_memory(peer_memory_bytes(rank_share, spec.moe.dispatcher), writers.handle, device, FOR_TOKENS)


def _make_stage(make: Callable[[], Stage], spec: Spec, groups: Groups, device: torch.device) -> Stage:
    """Make a stage, with memory for this rank's part of its weights only."""
    if not spec.memory.sharding.has_weight_shards:
        with torch.device(device):
            return _cast_weights(make(), getattr(torch, spec.model.dtype.value))
    # On the meta device first: a whole stage may not fit into the memory of a rank.
    with torch.device("meta"):
        stage = make()
    shares = getattr(torch, share_dtype(spec).value)
    stage = _cast_weights(stage, getattr(torch, spec.model.dtype.value), trained=shares)
    types = weight_types(spec.model.dtype, spec.training.precision.gradients)
    return fully_shard_stage(stage, types, groups, device, reads=has_replica_reads(spec))


def _cast_weights(stage: Stage, dtype: torch.dtype, trained: torch.dtype | None = None) -> Stage:
    """Cast weights to the model's type, or trained weights to their own type if one is given.

    Buffers keep their type: the selection bias of experts is always float32.
    """
    for parameter in stage.parameters():
        parameter.data = parameter.data.to(trained if trained and parameter.requires_grad else dtype)
    return stage


def schedule_config(model: Architecture, layout: Layout, dtype: torch.dtype) -> ScheduleConfig:
    """Return what Megatron's schedules and buffers read."""
    return ScheduleConfig(
        hidden_size=model.shape.hidden,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.virtual_pipeline if layout.virtual_pipeline > 1 else None,
        context_parallel_size=layout.context,
        expert_model_parallel_size=layout.expert,
        expert_tensor_parallel_size=layout.expert_tensor,
        sequence_parallel=layout.sequence_parallel,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        # Rows of a global batch have different lengths.
        variable_seq_lengths=True,
        # Batched exchanges give wrong losses on gloo when the schedule is interleaved, without an error.
        batch_p2p_comm=False,
        overlap_p2p_comm=layout.virtual_pipeline > 1,
    )
