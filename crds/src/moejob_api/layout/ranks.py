"""The place of every rank: its node, its local rank and its coordinate in every parallel group.

Ranks are numbered as Megatron numbers them (order tp-cp-ep-dp-pp): tensor neighbours are next to each other, then
context, then data, then pipeline. Experts divide the same ranks a second time: expert tensor, expert, expert data,
pipeline. Of eight GPUs with tensor 2, data 4 and expert 4 (Folded, expert tensor 1):

    rank                 0 1 2 3 4 5 6 7
    tensor               0 1 0 1 0 1 0 1
    data                 0 0 1 1 2 2 3 3
    expert               0 1 2 3 0 1 2 3
    expert data          0 0 0 0 1 1 1 1
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum

from moejob_api.layout.sizes import Layout


class ParallelGroup(StrEnum):
    """The parallel groups a rank belongs to."""

    TENSOR = "tensor"
    CONTEXT = "context"
    DATA = "data"
    PIPELINE = "pipeline"
    EXPERT_TENSOR = "expertTensor"
    EXPERT = "expert"
    EXPERT_DATA = "expertData"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """The place of one rank, and the part of model and batch that it holds."""

    rank: int
    node: int
    local_rank: int
    tensor: int
    context: int
    data: int
    pipeline: int
    expert_tensor: int
    expert: int
    expert_data: int


def rank_place(layout: Layout, rank: int) -> RankPlace:
    """The place of one rank."""
    stage_gpus = layout.gpus // layout.pipeline
    # Stages are outermost: of 16 GPUs with pipeline 2, rank 9 is the second rank of stage 1.
    pipeline, inside = divmod(rank, stage_gpus)
    node, local_rank = divmod(rank, layout.gpus_per_pod)
    return RankPlace(
        rank=rank,
        node=node,
        local_rank=local_rank,
        tensor=inside % layout.tensor,
        context=inside // layout.tensor % layout.context,
        data=inside // (layout.tensor * layout.context),
        pipeline=pipeline,
        expert_tensor=inside % layout.expert_tensor,
        expert=inside // layout.expert_tensor % layout.expert,
        expert_data=inside // (layout.expert_tensor * layout.expert),
    )


def rank_places(layout: Layout) -> Iterator[RankPlace]:
    """Every rank in order."""
    return (rank_place(layout, rank) for rank in range(layout.gpus))


def group_members(layout: Layout, group: ParallelGroup, rank: int) -> tuple[int, ...]:
    """The ranks that form `group` with this rank, in the order of their coordinates."""
    return spaced_ranks(rank, *_stride_and_size(layout, group))


def spaced_ranks(rank: int, stride: int, size: int) -> tuple[int, ...]:
    """The group of this rank among groups of `size` ranks that lie `stride` apart."""
    # Rank 5, stride 2, size 4: first is 5 - 5 // 2 % 4 * 2 = 1, the group (1, 3, 5, 7).
    first = rank - rank // stride % size * stride
    return tuple(range(first, first + stride * size, stride))


def _stride_and_size(layout: Layout, group: ParallelGroup) -> tuple[int, int]:
    """Distance between neighbours of a group, and how many there are."""
    match group:
        case ParallelGroup.TENSOR:
            return 1, layout.tensor
        case ParallelGroup.CONTEXT:
            return layout.tensor, layout.context
        case ParallelGroup.DATA:
            return layout.tensor * layout.context, layout.data
        case ParallelGroup.PIPELINE:
            return layout.gpus // layout.pipeline, layout.pipeline
        case ParallelGroup.EXPERT_TENSOR:
            return 1, layout.expert_tensor
        case ParallelGroup.EXPERT:
            return layout.expert_tensor, layout.expert
        case ParallelGroup.EXPERT_DATA:
            return layout.expert_tensor * layout.expert, layout.expert_data
