"""The memory of exchanges on a GPU: NCCL's buffers, and the rows that other ranks write here themselves.

On two nodes of eight GPUs, tensor 2, data 8 and expert 8 (Folded) make five communicators: of the world, tensor, data,
expert and the two replicas of each expert. An all-to-all sends to the seven other ranks of the node one by one:

    5 x 484 MiB + 7 x 384 MiB = 5,108 MiB
"""

from __future__ import annotations

from moejob_api.job.moe import DispatcherKind
from moejob_api.layout.expert_nodes import expert_nodes
from moejob_api.layout.sizes import Layout
from moejob_api.planner.memory.constants import COMMUNICATOR_BYTES, MOST_PEER_MEMORY_BYTES, PEER_BYTES
from moejob_api.planner.memory.microbatch_share import MicrobatchShare


def count_communicators(layout: Layout, dispatcher: DispatcherKind) -> int:
    """Communicators of one rank: the world, every group of more than one, and both of tokens that visit nodes first."""
    groups = (
        layout.tensor,
        layout.pipeline,
        layout.context,
        layout.data,
        layout.expert,
        layout.expert_tensor,
        layout.expert_data,
    )
    visits = 0 if expert_nodes(layout, dispatcher) is None else 2
    return 1 + sum(size > 1 for size in groups) + visits if layout.gpus > 1 else 0


def count_peers(layout: Layout, dispatcher: DispatcherKind) -> int:
    """Ranks of the same node to which a rank sends one by one: its expert group in an all-to-all, pipeline neighbours.

    Collectives of a whole group use the communicator's buffers.
    """
    stage = layout.gpus // layout.pipeline
    neighbours = min(2, layout.pipeline - 1) if stage < layout.gpus_per_pod else 0
    if dispatcher is DispatcherKind.ALL_GATHER:
        return neighbours
    return neighbours + max(1, min(layout.expert, layout.gpus_per_pod // layout.expert_tensor)) - 1


def communication_bytes(layout: Layout, dispatcher: DispatcherKind) -> int:
    """Bytes of NCCL's buffers on one GPU."""
    return count_communicators(layout, dispatcher) * COMMUNICATOR_BYTES + count_peers(layout, dispatcher) * PEER_BYTES


def peer_memory_bytes(share: MicrobatchShare, dispatcher: DispatcherKind) -> int:
    """Bytes of a rank that others of its expert group write to, under dispatcher Flex. The trainer asks for them.

    Up to a bound there is room for the worst routing of a micro batch, in which every token of the group needs this
    rank. Ranks of this node write the rows that come from other nodes.
    """
    if dispatcher is not DispatcherKind.FLEX or share.expert == 1:
        return 0
    worst = share.sequence_tokens * share.expert * share.hidden * share.element_bytes
    return min(worst, MOST_PEER_MEMORY_BYTES)


def has_writers(layout: Layout, dispatcher: DispatcherKind) -> bool:
    """Return whether every rank that writes rows here is in the same pod.

    An expert group inside one pod has such ranks only, and so has a group whose tokens visit nodes first.
    """
    # Megatron numbers the ranks of a group one behind the other.
    fits = layout.expert * layout.expert_tensor <= layout.gpus_per_pod
    return fits or expert_nodes(layout, dispatcher) is not None
