"""Host memory for copies of a rank's state: taken before the first save, and page-locked where a GPU copies into it.

The system hands out new pages more slowly than PCIe fills them, and a copy into pageable memory keeps the host busy:
without this module the first save would make training wait for both.
"""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from threading import Thread

import torch
from torch import Tensor

from moejob_api.arithmetic import round_up

# A call of the driver locks one block, and a thread that maps memory meanwhile waits for it.
BLOCK_BYTES = 1 << 30
# As torch aligns its own memory.
_ALIGNMENT = 64
_GIGA = 10**9
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CopySize:
    """The size of one copy."""

    elements: int
    dtype: torch.dtype

    @property
    def aligned_bytes(self) -> int:
        """Bytes of the copy, rounded up to where the next copy may begin."""
        return round_up(self.elements * self.dtype.itemsize, _ALIGNMENT)


class CopyMemory:
    """Memory for copies of these sizes. The system hands out its pages when they are first written."""

    def __init__(self, sizes: Sequence[CopySize], device: torch.device) -> None:
        self.sizes, self._device = tuple(sizes), device
        self._blocks: list[Tensor] = []
        self.copies: list[Tensor] = []
        for block_sizes in _group_into_blocks(self.sizes):
            block = torch.empty(sum(size.aligned_bytes for size in block_sizes), dtype=torch.uint8)
            self._blocks.append(block)
            self.copies += _cut_block(block, block_sizes)
        self._locked: list[int] = []
        # The driver keeps pages locked after the last mapping is gone. When the process ends, it unlocks them itself.
        weakref.finalize(self, _unlock_blocks, self._locked).atexit = False
        self._allocation: Thread | None = None

    def start_allocation(self) -> None:
        """Start to write every page, in a thread beside the training."""
        self._allocation = Thread(
            target=self._allocate_blocks, args=(torch.get_num_threads(),), name="copy-memory", daemon=True
        )
        self._allocation.start()

    def wait(self) -> None:
        """Wait until every page is written, if the thread was started."""
        if self._allocation is not None:
            self._allocation.join()
            self._allocation = None

    def _allocate_blocks(self, threads: int) -> None:
        start_time = time.monotonic()
        # A new thread of the host would use all cores; this one uses as many as its rank may.
        torch.set_num_threads(threads)
        for block in self._blocks:
            block.zero_()
        if self._device.type == "cuda":
            self.lock_blocks()
        summary = {"GB": round(sum(block.numel() for block in self._blocks) / _GIGA, 2), "locked": len(self._locked)}
        log.debug("took host memory for saves", extra=summary | {"seconds": round(time.monotonic() - start_time, 1)})

    def lock_blocks(self) -> None:
        """Page-lock the blocks for the GPU, until the system refuses one."""
        torch.cuda.set_device(self._device)
        runtime = torch.cuda.cudart()
        for block in filter(Tensor.numel, self._blocks):
            error_code = int(runtime.cudaHostRegister(block.data_ptr(), block.numel(), 0))
            if error_code:
                log.warning(
                    "the system locks no more host memory: training waits longer for saves",
                    extra={"locked": len(self._locked), "blocks": len(self._blocks), "cudaError": error_code},
                )
                return
            self._locked.append(block.data_ptr())


def _group_into_blocks(sizes: Sequence[CopySize]) -> Iterator[list[CopySize]]:
    """Yield the copies of each block: copies in their order, until together they reach the size of a block."""
    block_sizes: list[CopySize] = []
    block_bytes = 0
    for size in sizes:
        block_sizes.append(size)
        block_bytes += size.aligned_bytes
        if block_bytes >= BLOCK_BYTES:
            yield block_sizes
            block_sizes, block_bytes = [], 0
    if block_sizes:
        yield block_sizes


def _cut_block(block: Tensor, sizes: Sequence[CopySize]) -> Iterator[Tensor]:
    start = 0
    for size in sizes:
        yield block[start : start + size.elements * size.dtype.itemsize].view(size.dtype)
        start += size.aligned_bytes


def _unlock_blocks(pointers: Sequence[int]) -> None:
    for pointer in pointers:
        torch.cuda.cudart().cudaHostUnregister(pointer)
