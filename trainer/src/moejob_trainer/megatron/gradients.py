"""What happens to gradients between the backward pass and the optimizer: every replica ends up with the same sum."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from torch import Tensor

from moejob_trainer.groups import Group, Groups
from moejob_trainer.model.linear import is_expert, is_partial
from moejob_trainer.model.stage import Stage


def finish_gradients(chunks: Sequence[DistributedDataParallel], groups: Groups) -> None:
    """Sums gradients over replicas, over tensor ranks where each saw a part, and over both ends of a model that
    share its embedding."""
    for chunk in chunks:
        for buckets in exchanged_buckets(chunk):
            buckets.finish_grad_sync()
    _sum_parts(chunks, groups.tensor, of_experts=False)
    _sum_parts(chunks, groups.expert_tensor, of_experts=True)
    _sum_tied_embedding(chunks)


def exchanged_buckets(chunk: DistributedDataParallel) -> list[Any]:
    """The bucket groups that replicas exchange. gloo copies those of a lone replica to and fro, a tenth of a step."""
    groups = [*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups]
    is_begun = chunk.ddp_config.overlap_grad_reduce
    return [buckets for buckets in groups if is_begun or buckets.intra_distributed_optimizer_instance_size > 1]


def _sum_parts(chunks: Sequence[DistributedDataParallel], group: Group, *, of_experts: bool) -> None:
    parts = [
        parameter.main_grad
        for chunk in chunks
        for parameter in chunk.module.parameters()
        if parameter.requires_grad and is_partial(parameter) and is_expert(parameter) is of_experts
    ]
    if not parts or group.size == 1:
        return
    # Buffers of all tensor ranks look alike, so each sums the share that its replica group left to it.
    together = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(together, group=group.handle)
    for part, whole in zip(parts, together.split([part.numel() for part in parts]), strict=True):
        part.copy_(whole.view_as(part))


def _sum_tied_embedding(chunks: Sequence[DistributedDataParallel]) -> None:
    group = parallel_state.get_embedding_group(check_initialized=False)
    gradient = _tied_gradient([chunk.module for chunk in chunks])
    if gradient is not None and group is not None and group.size() > 1:
        dist.all_reduce(gradient, group=group)


def _tied_gradient(stages: Sequence[Stage]) -> Tensor | None:
    if not stages[0].shares_embedding:
        return None
    ends = [stage.embedding.weight for stage in stages if stage.place.is_first or stage.place.is_last]
    # Megatron's buffers give it its name.
    return getattr(ends[0], "main_grad", None) if ends else None
