"""This rank's stages behind Megatron's gradient buffers, and what its schedules want to know about them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
from megatron.core.enums import ModelType
from megatron.core.model_parallel_config import ModelParallelConfig
from torch import nn

from moejob_api.job.base import Dtype
from moejob_api.job.job import Spec
from moejob_api.job.resources import Accelerator
from moejob_api.layout.sizes import Layout
from moejob_api.layout.stages import stages as stages_of
from moejob_trainer.groups import Groups
from moejob_trainer.model.architecture import Architecture
from moejob_trainer.model.stage import Stage, StagePlace


@dataclass
class ScheduleConfig(ModelParallelConfig):
    """What Megatron's schedules and buffers read, beside what all its models have."""

    hidden_size: int = 0
    # Gradients are sums: the loss is divided by its global weight before the backward pass.
    calculate_per_token_loss: bool = True
    fine_grained_activation_offloading: bool = False
    fp8: None = None
    fp4: None = None


def built(model: Architecture, spec: Spec, layout: Layout, groups: Groups, device: torch.device) -> list[Stage]:
    """The stages of this rank, one unless the schedule is interleaved; their weights are not set."""
    dtype = getattr(torch, spec.model.dtype.value)
    schedule = _schedule_config(model, layout, dtype)
    made = []
    for place in places(model, spec, groups):
        with torch.device(device):
            stage = Stage(model, spec, groups, place)
        stage = _typed(stage, dtype)
        stage.config, stage.model_type = schedule, ModelType.encoder_or_decoder
        made.append(stage)
    return made


def places(model: Architecture, spec: Spec, groups: Groups) -> list[StagePlace]:
    """Which layers this rank holds, chunk by chunk."""
    stages = stages_of(spec.parallelism, len(model.shape.layers))
    if stages is None:
        raise ValueError(f"{len(model.shape.layers)} layers do not divide over {spec.parallelism.pipeline} stages")
    here, last = groups.pipeline.rank, groups.pipeline.size - 1
    chunks = stages[here].chunks
    return [
        StagePlace(
            layers=layers,
            is_first=here == 0 and index == 0,
            is_last=here == last and index == len(chunks) - 1,
        )
        for index, layers in enumerate(chunks)
    ]


def buffered(stages: Sequence[Stage], spec: Spec) -> list[DistributedDataParallel]:
    """The stages with contiguous gradients. Their weights move into buffers, so this comes before any optimizer."""
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=spec.training.precision.gradients is Dtype.FLOAT32,
        use_distributed_optimizer=True,
        # gloo would do the same work at the same time on the same cores.
        overlap_grad_reduce=spec.resources.accelerator is Accelerator.GPU,
    )
    chunks = [
        DistributedDataParallel(stage.config, config, stage, disable_bucketing=index > 0)
        for index, stage in enumerate(stages)
    ]
    no_sync = [chunk.no_sync for chunk in chunks]
    stages[0].config.no_sync_func = no_sync if len(chunks) > 1 else no_sync[0]  # type: ignore[union-attr]
    return chunks


def named_parameters(stages: Sequence[Stage]) -> Iterator[tuple[str, nn.Parameter]]:
    """Every parameter of this rank under its name in the whole model."""
    for stage in stages:
        yield from stage.named_parameters()


def _typed(stage: Stage, dtype: torch.dtype) -> Stage:
    """Weights in the model's type. Buffers keep theirs: the bias on the choice of experts is float32 everywhere."""
    for parameter in stage.parameters():
        parameter.data = parameter.data.to(dtype)
    return stage


def _schedule_config(model: Architecture, layout: Layout, dtype: torch.dtype) -> ScheduleConfig:
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
