"""Memory of each rank of a group that all of its ranks read and write: over NVLink on GPUs, shared memory on CPUs.

Nothing but its barrier orders what ranks do to it: what one writes and another reads lies on two sides of one.
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
    # Return, or let the stream go on, when every rank of the group is here and what they wrote can be read.
    barrier: Callable[[], None]
    # int64 [ranks], where each share begins for this process; kernels read it.
    addresses: Tensor = field(init=False)
    # Exchanges that did not fit.
    overflows: int = 0
    # Every exchange asks for the same few: to make them again would take the host longer than the exchange.
    _views: dict[tuple[int, torch.dtype], tuple[Tensor, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        first = self.shares[self.rank]
        self.addresses = torch.tensor([share.data_ptr() for share in self.shares], device=first.device)

    def rows(self, width: int, dtype: torch.dtype) -> int:
        """Rows of this width that a share has room for."""
        return self.shares[self.rank].numel() // (width * dtype.itemsize)

    def as_rows(self, width: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """The shares as rows, by rank, each [rows, width]."""
        kind = width, dtype
        if kind not in self._views:
            taken = self.rows(width, dtype) * width * dtype.itemsize
            self._views[kind] = tuple(share[:taken].view(dtype).view(-1, width) for share in self.shares)
        return self._views[kind]

    def count_overflow(self, needed: int, rows: int) -> None:
        """Count an exchange that goes another way; the group's first rank says so the first time."""
        self.overflows += 1
        if self.overflows == 1 and self.rank == 0:
            log.warning(
                "tokens of a layer need %d rows on one rank, dispatcher Flex has room for %d: they go by all-to-all",
                needed,
                rows,
            )
