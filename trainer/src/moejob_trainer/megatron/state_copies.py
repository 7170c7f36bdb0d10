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
from moejob_trainer.megatron.master_weights import Values

# Large enough for the full speed of PCIe, and small beside the activations on the GPU: joining 2^23 weights and their
# remainders to float32 there takes up to 96 MiB, 12 bytes each.
PART_ELEMENTS = 1 << 23


class StateCopies:
    """The unfinished copy, if any. Wait for it before any change of the state."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._crossing: Crossing | None = None
        self._copy: StateCopy | None = None
        self._memory: CopyMemory | None = None

    def prepare(self, values: Sequence[Values]) -> None:
        """Start to allocate memory for copies of these values."""
        known, room = self._memory, self._room(values)
        if room is not known:
            room.take()

    def prepared(self) -> None:
        """Wait until the memory is allocated."""
        if self._memory is not None:
            self._memory.wait()

    def begin(self, values: Sequence[Values]) -> StateCopy:
        """Return a copy of the present values, for another thread to make.

        It takes the memory of the copy before, which must not be in use any more.
        """
        self.finish()
        room = self._room(values)
        self.prepared()
        if self._device.type == "cuda":
            self._crossing = self._crossing or Crossing(self._device)
            self._crossing.follow()
        self._copy = StateCopy(values, room.copies, self._crossing)
        return self._copy

    def finish(self) -> None:
        """Wait until the copy is made."""
        if self._copy is not None:
            self._copy.wait()
            self._copy = None

    def _room(self, values: Sequence[Values]) -> CopyMemory:
        """Return memory for copies of these values: the present memory, if its sizes are the same."""
        sizes = tuple(CopySize(of.storage.numel(), of.dtype) for of in values)
        if self._memory is None or self._memory.sizes != sizes:
            self._memory = CopyMemory(sizes, self._device)
        return self._memory


class StateCopy:
    """A copy of some values, in their order."""

    def __init__(self, values: Sequence[Values], copies: Sequence[Tensor], crossing: Crossing | None) -> None:
        self._values, self._copies, self._crossing, self._ended = values, copies, crossing, Event()
        # Copies use as many host threads as the rank may; a new thread would use all cores.
        self._threads = torch.get_num_threads()
        # For which the training has waited for this copy.
        self.waited_seconds = 0.0

    def made(self) -> Sequence[Tensor]:
        """Make the copy. The next update waits until this has returned or failed."""
        try:
            torch.set_num_threads(self._threads)
            self._fill()
        finally:
            self._ended.set()
            self._values = ()
        return self._copies

    def wait(self) -> None:
        """Wait until nothing reads the values any more."""
        begun = time.monotonic()
        self._ended.wait()
        self.waited_seconds += time.monotonic() - begun

    def _fill(self) -> None:
        for values, into in _parts(self._values, self._copies):
            if self._crossing is not None and values.storage.is_cuda:
                self._crossing.send(values, into)
            else:
                into.copy_(values.read())
        if self._crossing is not None:
            self._crossing.arrive()


class Crossing:
    """A separate stream from a GPU to the host, straight to locked memory or through two locked buffers."""

    def __init__(self, device: torch.device) -> None:
        self._stream = torch.cuda.Stream(device)
        self._slots = PinnedPart(), PinnedPart()
        self._next = cycle(self._slots)

    def follow(self) -> None:
        """Order later copies behind everything that the training has launched so far."""
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))

    def send(self, values: Values, into: Tensor) -> None:
        """Send values to the host; another part may still be on its way when this returns."""
        with torch.cuda.stream(self._stream):
            if into.is_pinned():
                into.copy_(values.read(), non_blocking=True)
            else:
                next(self._next).send(values.read(), into)

    def arrive(self) -> None:
        """Wait until all copies are at their destinations."""
        for slot in self._slots:
            slot.arrive()
        self._stream.synchronize()


class PinnedPart:
    """A locked buffer for one part. One of two fills while the host empties the other."""

    def __init__(self) -> None:
        self._memory = torch.empty(torch.float32.itemsize * PART_ELEMENTS, dtype=torch.uint8, pin_memory=True)
        self._sent = torch.cuda.Event()
        self._into: Tensor | None = None

    def send(self, numbers: Tensor, into: Tensor) -> None:
        """Move the part before to its destination, and start to copy the next one to the buffer."""
        self.arrive()
        self._pinned(into).copy_(numbers, non_blocking=True)
        self._sent.record()
        self._into = into

    def arrive(self) -> None:
        """Wait for the numbers in the buffer, and move them to their destination."""
        if self._into is None:
            return
        self._sent.synchronize()
        self._into.copy_(self._pinned(self._into))
        self._into = None

    def _pinned(self, like: Tensor) -> Tensor:
        return self._memory[: like.numel() * like.element_size()].view(like.dtype)


def _parts(values: Sequence[Values], copies: Sequence[Tensor]) -> Iterator[tuple[Values, Tensor]]:
    for one, copy in zip(values, copies, strict=True):
        for start in range(0, copy.numel(), PART_ELEMENTS):
            stop = min(start + PART_ELEMENTS, copy.numel())
            yield one.part(start, stop), copy[start:stop]
