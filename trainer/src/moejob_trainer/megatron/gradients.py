"""Gradients between the backward pass and the optimizer: every replica ends up with the same sum.

The training engine computes their norm next, and clips in the optimizer's update: see `training_engine.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor

from moejob_trainer.distributed.groups import Group, Groups
from moejob_trainer.megatron.data_parallel import DataParallel
from moejob_trainer.model.linear import is_expert, is_partial
from moejob_trainer.model.stage import ModelStage


def finish_gradients(stages: Sequence[ModelStage], data_parallel: DataParallel, groups: Groups) -> None:
    """Sum gradients over replicas, over tensor ranks that each computed a part, and over the ends of a tied model.

    The tied embedding lies on the first stage, and a copy of it on the last as the output layer: both get the sum of
    their two gradients, and so stay equal.
    """
    data_parallel.sum_gradients()
    _sum_parts(stages, data_parallel, groups.tensor, of_experts=False)
    _sum_parts(stages, data_parallel, groups.expert_tensor, of_experts=True)
    _sum_tied_embedding(stages, data_parallel)


def _sum_parts(stages: Sequence[ModelStage], data_parallel: DataParallel, group: Group, *, of_experts: bool) -> None:
    parts = [
        data_parallel.local_gradient(parameter)
        for stage in stages
        for parameter in stage.parameters()
        if parameter.requires_grad and is_partial(parameter) and is_expert(parameter) is of_experts
    ]
    if not parts or group.size == 1:
        return
    # All tensor ranks divide their parameters over replicas alike, so their shares are of the same elements.
    flat_sum = torch.cat([part.flatten() for part in parts])
    dist.all_reduce(flat_sum, group=group.handle)
    for part, summed in zip(parts, flat_sum.split([part.numel() for part in parts]), strict=True):
        part.copy_(summed.view_as(part))


def _sum_tied_embedding(stages: Sequence[ModelStage], data_parallel: DataParallel) -> None:
    group = parallel_state.get_embedding_group(check_initialized=False)
    if group is None or group.size() == 1:
        return
    gradient = _tied_gradient(stages, data_parallel)
    if gradient is not None:
        dist.all_reduce(gradient, group=group)


def _tied_gradient(stages: Sequence[ModelStage], data_parallel: DataParallel) -> Tensor | None:
    if not stages[0].shares_embedding:
        return None
    ends = [stage.embedding_weight for stage in stages if stage.place.is_first or stage.place.is_last]
    return data_parallel.local_gradient(ends[0]) if ends and ends[0].requires_grad else None
