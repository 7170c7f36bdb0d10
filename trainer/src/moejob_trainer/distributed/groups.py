"""The process groups that this rank belongs to.

Knows torch.distributed only: moejob_trainer.megatron.topology decides which ranks form a group.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch.distributed as dist

from moejob_trainer.distributed.peer_memory import PeerMemory


@dataclass(frozen=True, slots=True)
class Group:
    """Ranks that share something; a group of one never communicates."""

    rank: int = 0
    size: int = 1
    handle: dist.ProcessGroup | None = None


ALONE = Group()


@dataclass(frozen=True, slots=True)
class Groups:
    """Every group that this rank belongs to. Experts divide the ranks of a stage a second time."""

    tensor: Group = ALONE
    context: Group = ALONE
    data: Group = ALONE
    pipeline: Group = ALONE
    # Ranks with the same dense weights: they see other documents, or other parts of the same ones.
    replicas: Group = ALONE
    expert: Group = ALONE
    expert_tensor: Group = ALONE
    # Parts of the expert group, where tokens visit nodes first: one rank of each node, all at this rank's place in
    # their node, and the ranks of this node.
    expert_across: Group = ALONE
    expert_inside: Group = ALONE
    expert_replicas: Group = ALONE
    world: Group = ALONE
    # Through which the expert group, or its ranks on this node, exchange tokens.
    expert_memory: PeerMemory | None = None
