"""Exchanges between the ranks of a run about a step. They carry numbers, never pickled objects."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from moejob_trainer.distributed import messages
from moejob_trainer.distributed.collectives import sum_over_group
from moejob_trainer.distributed.encoding import BOOLEAN, Array
from moejob_trainer.distributed.groups import ALONE, Group


@dataclass(frozen=True, slots=True)
class PeerRanks:
    """The ranks of a run. Every rank calls the same methods in the same order."""

    rank: int = 0
    # All ranks, on the CPU. None: there is one.
    control: dist.ProcessGroup | None = None
    # Ranks that see other documents.
    data: Group = ALONE
    device: str | torch.device = "cpu"

    @property
    def is_first(self) -> bool:
        """Return whether this rank speaks for all."""
        return self.rank == 0

    def broadcast_flag(self, flag: bool) -> bool:
        """Return rank 0's flag on every rank."""
        return messages.broadcast_value(flag, BOOLEAN, self.control)

    def broadcast_arrays(self, arrays: Mapping[str, Array] | None) -> Mapping[str, Array]:
        """Return rank 0's arrays on every rank."""
        return messages.broadcast_arrays(arrays, self.control)

    def sum_over_ranks(self, values: Tensor) -> Array:
        """Return the sum over the ranks that see other documents."""
        sums: Array = sum_over_group(values.to(self.device), self.data).cpu().numpy()
        return sums

    def max_over_ranks(self, value: float) -> float:
        """Return the largest value of all ranks."""
        if self.control is None:
            return value
        largest = torch.tensor([value], dtype=torch.float64)
        dist.all_reduce(largest, dist.ReduceOp.MAX, self.control)
        return float(largest)
