"""Memory of each rank of a group that all of its ranks read and write: over NVLink on GPUs, shared memory on CPUs.

Only its barrier orders accesses of ranks: between a write of one rank and a read of another lies a barrier.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

log = logging.getLogger(__name__)


@dataclass(eq=False)
class PeerMemory:
    """The same number of bytes on every rank of a group, as this process sees them."""

    rank: int
    # uint8 [bytes], by rank.
    shares: tuple[Tensor, ...]
    # Wait, on the host or on the stream, until every rank has called it; then all earlier writes can be read.
    barrier: Callable[[], None]
    # int64 [ranks]: the address of each share in this process, for kernels.
    addresses: Tensor = field(init=False)
    # Exchanges with more rows than the memory has.
    overflows: int = 0
    # Exchanges use a few views again and again: making them takes the host longer than an exchange takes.
    _views: dict[tuple[int, torch.dtype], tuple[Tensor, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        first = self.shares[self.rank]
        self.addresses = torch.tensor([share.data_ptr() for share in self.shares], device=first.device)

    def row_capacity(self, width: int, dtype: torch.dtype) -> int:
        """Return how many rows of this width fit into a share."""
        return self.shares[self.rank].numel() // (width * dtype.itemsize)

    def view_as_rows(self, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Return the shares of all ranks as rows, each [rows, width]."""
        key = width, dtype
        if key not in self._views:
            used_bytes = self.row_capacity(width, dtype) * width * dtype.itemsize
            self._views[key] = tuple(share[:used_bytes].view(dtype).view(-1, width) for share in self.shares)
        return self._views[key]

    def count_overflow(self, needed: int, rows: int) -> None:
        """Count an exchange that does not fit and goes by all-to-all; the first rank logs the first of them."""
        self.overflows += 1
        if self.overflows == 1 and self.rank == 0:
            log.warning(
                "tokens of a layer need %d rows on one rank, dispatcher Flex has room for %d: they go by all-to-all",
                needed,
                rows,
            )
