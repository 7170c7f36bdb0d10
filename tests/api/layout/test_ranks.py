"""Every rank has one place; groups partition the ranks. That they are Megatron's own is tested beside Megatron."""

from __future__ import annotations

import pytest

from moejob_api.job.parallelism import ExpertLayout, Parallelism
from moejob_api.layout.ranks import ParallelGroup, group_members, rank_place, rank_places
from moejob_api.layout.sizes import Layout, derive_layout

LAYOUTS = [
    pytest.param(Parallelism(tensor=2, pipeline=2, expert=4), id="product"),
    pytest.param(Parallelism(tensor=2, pipeline=2, context=2, expert=2, data=2), id="product with context"),
    pytest.param(
        Parallelism(tensor=2, context=2, data=4, expert=8, expert_layout=ExpertLayout.FOLDED), id="folded over all"
    ),
    pytest.param(
        Parallelism(tensor=2, pipeline=3, data=4, expert=2, expert_tensor=2, expert_layout=ExpertLayout.FOLDED),
        id="folded with expert tensor",
    ),
]


@pytest.mark.parametrize("asked", LAYOUTS)
@pytest.mark.parametrize("group", list(ParallelGroup), ids=str)
def test_a_group_partitions_the_ranks_and_differs_in_its_own_coordinate_only(
    asked: Parallelism, group: ParallelGroup
) -> None:
    sizes = derive_layout(asked, gpus_per_node=8)
    groups = {group_members(sizes, group, rank) for rank in range(sizes.gpus)}
    assert sorted(rank for ranks in groups for rank in ranks) == list(range(sizes.gpus))
    for ranks in groups:
        assert [coordinate(sizes, rank, group) for rank in ranks] == list(range(len(ranks)))
        assert len({others(sizes, rank, group) for rank in ranks}) == 1


def test_nodes_take_ranks_in_order() -> None:
    sizes = derive_layout(Parallelism(tensor=4, data=4), gpus_per_node=8)
    assert [(p.node, p.local_rank) for p in rank_places(sizes)] == [(rank // 8, rank % 8) for rank in range(16)]


FIELD = {
    ParallelGroup.TENSOR: "tensor",
    ParallelGroup.CONTEXT: "context",
    ParallelGroup.DATA: "data",
    ParallelGroup.PIPELINE: "pipeline",
    ParallelGroup.EXPERT_TENSOR: "expert_tensor",
    ParallelGroup.EXPERT: "expert",
    ParallelGroup.EXPERT_DATA: "expert_data",
}
GRIDS = (
    (ParallelGroup.TENSOR, ParallelGroup.CONTEXT, ParallelGroup.DATA, ParallelGroup.PIPELINE),
    (ParallelGroup.EXPERT_TENSOR, ParallelGroup.EXPERT, ParallelGroup.EXPERT_DATA, ParallelGroup.PIPELINE),
)


def coordinate(sizes: Layout, rank: int, group: ParallelGroup) -> int:
    value: int = getattr(rank_place(sizes, rank), FIELD[group])
    return value


def others(sizes: Layout, rank: int, group: ParallelGroup) -> tuple[int, ...]:
    """The coordinates of the same grid that the group does not vary."""
    grid = next(grid for grid in GRIDS if group in grid)
    return tuple(coordinate(sizes, rank, other) for other in grid if other is not group)
