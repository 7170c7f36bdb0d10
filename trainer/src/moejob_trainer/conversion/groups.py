"""The process groups over which a model is divided, as conversion needs them; without any it is one process's.

Plain torch.distributed: the groups are passed in.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from moejob_api.layout.ranks import ParallelGroup
from moejob_trainer.model.parameters import Coordinates


@dataclass(frozen=True)
class ModelGroups:
    """A rank's groups; None where it is alone. `world` are all ranks of the run and carries messages only."""

    world: ProcessGroup | None = None
    tensor: ProcessGroup | None = None
    expert: ProcessGroup | None = None
    expert_tensor: ProcessGroup | None = None

    @property
    def coordinates(self) -> Coordinates:
        """The coordinates of this rank in them."""
        return Coordinates(
            *_rank_and_size(self.tensor),
            *_rank_and_size(self.expert),
            *_rank_and_size(self.expert_tensor),
        )

    @property
    def rank(self) -> int:
        """This rank in the world group."""
        return _rank_and_size(self.world)[0]

    def process_group(self, group: ParallelGroup) -> ProcessGroup | None:
        """The group that divides parameters in this way."""
        return {
            ParallelGroup.TENSOR: self.tensor,
            ParallelGroup.EXPERT: self.expert,
            ParallelGroup.EXPERT_TENSOR: self.expert_tensor,
        }[group]


def group_ranks(group: ProcessGroup | None, fallback_rank: int) -> tuple[int, ...]:
    """Return the ranks of a group in order; this rank alone where there is no group."""
    return (fallback_rank,) if group is None else tuple(dist.get_process_group_ranks(group))


def gather_block(block: Tensor, axis: int, group: ProcessGroup | None) -> Tensor | None:
    """The blocks of all ranks of a group side by side on its first rank; None on the others."""
    if group is None:
        return block
    rank, size = _rank_and_size(group)
    block = block.contiguous()
    # All ranks hold equal parts of the axis, so this rank's block has the shape of every other.
    blocks = [torch.empty_like(block) for _ in range(size)] if rank == 0 else None
    dist.gather(block, blocks, group=group, group_dst=0)
    return None if blocks is None else torch.cat(blocks, dim=axis)


def _rank_and_size(group: ProcessGroup | None) -> tuple[int, int]:
    return (0, 1) if group is None else (group.rank(), group.size())
