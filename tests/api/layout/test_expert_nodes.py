"""The division of expert groups over nodes: by hand, and against where every rank lies."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejob_api.job.moe import DispatcherKind
from moejob_api.job.parallelism import ExpertLayout, Parallelism
from moejob_api.layout.expert_nodes import ExpertNodes, expert_nodes
from moejob_api.layout.ranks import ParallelGroup, group_members
from moejob_api.layout.sizes import Layout, derive_layout

FOLDED: dict[str, Any] = {"expert_layout": ExpertLayout.FOLDED}


@pytest.mark.parametrize(
    ("sizes", "per_node", "expected"),
    [
        pytest.param({"expert": 8}, 4, (2, 4, 1), id="two nodes of four"),
        pytest.param({"expert": 8}, 2, (4, 2, 1), id="four nodes of two"),
        pytest.param({"expert": 8}, 8, None, id="one node"),
        pytest.param({"expert": 8}, 1, None, id="one rank on each node"),
        pytest.param({"expert": 4, "data": 2}, 4, None, id="a group on each node"),
        pytest.param({"expert": 4, "tensor": 2}, 4, (2, 2, 2), id="beside expert tensor ranks"),
        pytest.param({"expert": 4, "tensor": 2}, 2, None, id="expert tensor ranks fill a node"),
        pytest.param({"expert": 8, "tensor": 2, "data": 4, **FOLDED}, 4, (2, 4, 1), id="experts whole beside TP2"),
        pytest.param({"expert": 8, "context": 2, "data": 4, **FOLDED}, 4, (2, 4, 1), id="beside CP2"),
        pytest.param({"expert": 8, "pipeline": 2}, 4, (2, 4, 1), id="in each of two stages"),
        pytest.param({"expert": 6, "data": 2}, 4, None, id="four and two"),
        pytest.param({"expert": 8, "data": 3}, 12, None, id="one group in three on two nodes"),
    ],
)
def test_expert_groups_over_nodes(sizes: dict[str, Any], per_node: int, expected: tuple[int, int, int] | None) -> None:
    found = expert_nodes(derive_layout(Parallelism(**sizes), per_node), DispatcherKind.FLEX)
    assert found == (None if expected is None else ExpertNodes(*expected))


@pytest.mark.parametrize("dispatcher", [DispatcherKind.ALL_TO_ALL, DispatcherKind.ALL_GATHER])
def test_other_dispatchers_know_no_nodes(dispatcher: DispatcherKind) -> None:
    assert expert_nodes(derive_layout(Parallelism(expert=8), 4), dispatcher) is None


def test_ranks_inside_a_node_and_across_nodes() -> None:
    sizes = derive_layout(Parallelism(expert=4, tensor=2, pipeline=2), 4)
    nodes = expert_nodes(sizes, DispatcherKind.FLEX)
    assert nodes is not None
    assert [nodes.ranks_inside_node(rank) for rank in (0, 3, 12)] == [(0, 2), (1, 3), (12, 14)]
    assert [nodes.ranks_across_nodes(rank) for rank in (0, 3, 12)] == [(0, 4), (3, 7), (8, 12)]


LAYOUTS = st.builds(
    lambda tensor, context, pipeline, data, expert, expert_tensor: Parallelism(
        tensor=tensor,
        context=context,
        pipeline=pipeline,
        data=data * expert * expert_tensor,
        expert=expert,
        expert_tensor=expert_tensor,
        **FOLDED,
    ),
    *(st.sampled_from(sizes) for sizes in ((1, 2), (1, 2), (1, 2), (1, 2, 3), (1, 2, 3, 4, 6, 8, 12), (1, 2))),
)


@given(LAYOUTS, st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16]))
def test_tokens_visit_nodes_exactly_where_every_group_has_as_many_ranks_on_each(asked: Parallelism, node: int) -> None:
    sizes = derive_layout(asked, node)
    found = expert_nodes(sizes, DispatcherKind.FLEX)
    on_nodes = {tuple(_on_nodes(sizes, rank).values()) for rank in range(sizes.gpus)}
    is_even = all(len(counts) > 1 and counts[0] > 1 and len(set(counts)) == 1 for counts in on_nodes)
    assert (found is not None) is is_even
    if found is None:
        return
    for rank in range(sizes.gpus):
        group = group_members(sizes, ParallelGroup.EXPERT, rank)
        here = tuple(each for each in group if each // node == rank // node)
        assert found.ranks_inside_node(rank) == here
        assert found.ranks_across_nodes(rank) == tuple(each for each in group if (each - rank) % node == 0)
        assert (found.nodes, found.ranks) == (len(group) // len(here), len(here))
        # Experts of a node lie one behind the other: its number is the first part of a rank's place in the group.
        assert group.index(rank) == found.ranks_across_nodes(rank).index(rank) * found.ranks + here.index(rank)


def _on_nodes(sizes: Layout, rank: int) -> Counter[int]:
    return Counter(each // sizes.gpus_per_pod for each in group_members(sizes, ParallelGroup.EXPERT, rank))
