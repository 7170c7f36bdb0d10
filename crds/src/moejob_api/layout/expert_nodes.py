"""The division of an expert group over nodes: tokens travel once to each node, and inside it once to each rank.

Ranks of an expert group lie `expert_tensor` apart, one group behind the other. For expert 4, expertTensor 2 on nodes of
four GPUs:

    node 0: ranks 0 1 2 3    node 1: ranks 4 5 6 7
    expert groups       0 2 4 6       1 3 5 7
    inside a node       0 2    4 6    1 3    5 7
    across nodes        0 4    2 6    1 5    3 7
"""

from __future__ import annotations

from dataclasses import dataclass

from moejob_api.job.moe import DispatcherKind
from moejob_api.layout.ranks import spaced_ranks
from moejob_api.layout.sizes import Layout


@dataclass(frozen=True, slots=True)
class ExpertNodes:
    """Nodes of each expert group, its ranks on each of them, and the distance between these; equal in all groups."""

    nodes: int
    ranks: int
    stride: int

    def ranks_inside_node(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of this one's expert group on its node."""
        return spaced_ranks(rank, self.stride, self.ranks)

    def ranks_across_nodes(self, rank: int) -> tuple[int, ...]:
        """Return the ranks of this one's expert group that have its place inside their node, by node."""
        return spaced_ranks(rank, self.stride * self.ranks, self.nodes)


def expert_nodes(layout: Layout, dispatcher: DispatcherKind) -> ExpertNodes | None:
    """Return the nodes that tokens visit on the way to their experts; None where they go straight to ranks.

    With one rank on each node both ways are the same.
    """
    ranks, remainder = divmod(layout.gpus_per_pod, layout.expert_tensor)
    if dispatcher is not DispatcherKind.FLEX or remainder or ranks <= 1:
        return None
    # Groups begin at multiples of their size: they fill whole nodes, or some have unequal parts on two.
    nodes, unequal = divmod(layout.expert, ranks)
    if unequal or nodes <= 1:
        return None
    return ExpertNodes(nodes, ranks, layout.expert_tensor)
