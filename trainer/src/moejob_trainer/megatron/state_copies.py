"""Copies of a rank's state to the host, beside the training: the state changes in updates only.

    stream of the training   update n | forward and backward of n + 1 | wait | update n + 1
    stream of the copies              | part, part, part, part ------------> |

A part is copied straight to its destination if that is page-locked. Where the system refuses to lock more, the part is
copied to a small locked buffer, and a host thread moves it on to its destination while the next part is copied.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import cycle
from threading import Event

import torch
from torch import Tensor

from moejob_trainer.megatron.copy_memory import CopyMemory, CopySize
from moejob_trainer.megatron.master_weights import StoredNumbers

# Large enough for the full speed of PCIe, and small beside the activations on the GPU: joining 2^23 weights and their
# remainders to float32 there takes up to 96 MiB, 12 bytes each.
PART_ELEMENTS = 1 << 23


class StateCopies:
    """The unfinished copy, if any. Wait for it before any change of the state."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._crossing: HostTransfer | None = None
        self._copy: StateCopy | None = None
        self._memory: CopyMemory | None = None

    def prepare_memory(self, values: Sequence[StoredNumbers]) -> None:
        """Start to allocate memory for copies of these values."""
        previous, memory = self._memory, self._copy_memory(values)
        if memory is not previous:
            memory.start_allocation()

    def wait_for_memory(self) -> None:
        """Wait until the memory is allocated."""
        if self._memory is not None:
            self._memory.wait()

    def start_copy(self, values: Sequence[StoredNumbers]) -> StateCopy:
        """Return a copy of the present values, for another thread to make.

        It takes the memory of the copy before, which must not be in use any more.
        """
        self.finish_copy()
        memory = self._copy_memory(values)
        self.wait_for_memory()
        if self._device.type == "cuda":
            self._crossing = self._crossing or HostTransfer(self._device)
            self._crossing.follow_training()
        self._copy = StateCopy(values, memory.copies, self._crossing)
        return self._copy

    def finish_copy(self) -> None:
        """Wait until the copy is made."""
        if self._copy is not None:
            self._copy.wait()
            self._copy = None

    def _copy_memory(self, values: Sequence[StoredNumbers]) -> CopyMemory:
        """Return memory for copies of these values: the present memory, if its sizes are the same."""
        sizes = tuple(CopySize(value.storage.numel(), value.dtype) for value in values)
        if self._memory is None or self._memory.sizes != sizes:
            self._memory = CopyMemory(sizes, self._device)
        return self._memory


class StateCopy:
    """A copy of some values, in their order."""

    def __init__(
        self, values: Sequence[StoredNumbers], copies: Sequence[Tensor], crossing: HostTransfer | None
    ) -> None:
        self._values, self._copies, self._crossing, self._ended = values, copies, crossing, Event()
        # Copies use as many host threads as the rank may; a new thread would use all cores.
        self._threads = torch.get_num_threads()
        # For which the training has waited for this copy.
        self.waited_seconds = 0.0

    def make_copies(self) -> Sequence[Tensor]:
        """Make the copy. The next update waits until this has returned or failed."""
        try:
            torch.set_num_threads(self._threads)
            self._fill_copies()
        finally:
            self._ended.set()
            self._values = ()
        return self._copies

    def wait(self) -> None:
        """Wait until nothing reads the values any more."""
        start_time = time.monotonic()
        self._ended.wait()
        self.waited_seconds += time.monotonic() - start_time

    def _fill_copies(self) -> None:
        for values, target in _split_into_parts(self._values, self._copies):
            if self._crossing is not None and values.storage.is_cuda:
                self._crossing.send_part(values, target)
            else:
                target.copy_(values.read())
        if self._crossing is not None:
            self._crossing.wait_for_arrival()


class HostTransfer:
    """A separate stream from a GPU to the host, straight to locked memory or through two locked buffers."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._slots = PinnedPart(), PinnedPart()
        self._next = cycle(self._slots)

    def follow_training(self) -> None:
        """Order later copies behind everything that the training has launched so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def send_part(self, values: StoredNumbers, target: Tensor) -> None:
        """Send values to the host; another part may still be on its way when this returns."""
        with torch.cuda.stream(self._stream):
            if target.is_pinned():
                target.copy_(values.read(), non_blocking=True)
            else:
                next(self._next).send_part(values.read(), target)

    def wait_for_arrival(self) -> None:
        """Wait until all copies are at their destinations."""
        for slot in self._slots:
            slot.wait_for_arrival()
        self._stream.synchronize()


class PinnedPart:
    """A locked buffer for one part. One of two fills while the host empties the other."""

    def __init__(self) -> None:
        self._memory = torch.empty(torch.float32.itemsize * PART_ELEMENTS, dtype=torch.uint8, pin_memory=True)
        self._sent = torch.cuda.Event()
        self._into: Tensor | None = None

    def send_part(self, numbers: Tensor, target: Tensor) -> None:
        """Move the part before to its destination, and start to copy the next one to the buffer."""
        self.wait_for_arrival()
        self._view_memory(target).copy_(numbers, non_blocking=True)
        self._sent.record()
        self._into = target

    def wait_for_arrival(self) -> None:
        """Wait for the numbers in the buffer, and move them to their destination."""
        if self._into is None:
            return
        self._sent.synchronize()
        self._into.copy_(self._view_memory(self._into))
        self._into = None

    def _view_memory(self, like: Tensor) -> Tensor:
        return self._memory[: like.numel() * like.element_size()].view(like.dtype)


def _split_into_parts(
    values: Sequence[StoredNumbers], copies: Sequence[Tensor]
) -> Iterator[tuple[StoredNumbers, Tensor]]:
    for value, copy in zip(values, copies, strict=True):
        for start in range(0, copy.numel(), PART_ELEMENTS):
            stop = min(start + PART_ELEMENTS, copy.numel())
            yield value.slice_range(start, stop), copy[start:stop]
