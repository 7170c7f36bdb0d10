"""AdamW of pieces whose state lies in host memory: a chunk at a time, through pinned memory that is used again.

    GPU     gradient * scale --+                                   +--> weight
    PCIe                       +--> arriving           leaving ----+
    host                                \\--> AdamW --> /

State stays in pageable memory: pinning tens of gigabytes takes longer than many steps. Only copies go through pinned
buffers, two of each kind: while the host updates a chunk, the gradients of the next one arrive and the weights of the
last one leave. One buffer of each kind, for 2^26 float32 gradients and bfloat16 weights, pins 6 * 2^26 bytes: 384 MiB.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from moejob_api.planner.memory.constants import UPDATE_ELEMENTS


@dataclass(frozen=True, slots=True, eq=False)
class UpdateChunk:
    """A range of one parameter's elements: weights and gradients on a device, state on the host."""

    weight: Tensor
    gradient: Tensor
    main: Tensor
    first_moment: Tensor
    second_moment: Tensor
    is_decayed: bool

    def split_parts(self, max_elements: int) -> Iterator[UpdateChunk]:
        """Yield the chunk in parts of at most this many elements."""
        return (
            UpdateChunk(weight, gradient, main, first, second, self.is_decayed)
            for weight, gradient, main, first, second in zip(
                self.weight.split(max_elements),
                self.gradient.split(max_elements),
                self.main.split(max_elements),
                self.first_moment.split(max_elements),
                self.second_moment.split(max_elements),
                strict=True,
            )
        )


# Main weights, gradients and both moments, in float32.
Numbers = tuple[Tensor, Tensor, Tensor, Tensor]
# Update main weights and moments by the gradients, in place; the last argument: whether weights decay.
Step = Callable[[Numbers, bool], None]


class HostUpdate:
    """Updates chunks one after the other; with `overlaps_copies` the next one is copied meanwhile."""

    def __init__(self, *, overlaps_copies: bool, elements: int = UPDATE_ELEMENTS) -> None:
        self._ahead, self._elements = int(overlaps_copies), elements
        self._buffers: tuple[HostBuffers, ...] = ()

    def update(self, pieces: Sequence[UpdateChunk], gradient_scale: float, step: Step) -> None:
        """Update main weights and moments, and the weights on the device: kernels launched later read the new ones."""
        if not self._buffers and pieces:
            self._elements = min(self._elements, max(piece.main.numel() for piece in pieces))
            self._buffers = tuple(HostBuffers(pieces[0].weight, self._elements) for _ in range(1 + self._ahead))
        pending: deque[tuple[HostBuffers, UpdateChunk]] = deque()
        chunks = (chunk for piece in pieces for chunk in piece.split_parts(self._elements))
        for buffers, chunk in zip(cycle(self._buffers), chunks, strict=False):
            buffers.fetch(chunk, gradient_scale)
            pending.append((buffers, chunk))
            if len(pending) > self._ahead:
                _finish_chunk(*pending.popleft(), step)
        for buffers, chunk in pending:
            _finish_chunk(buffers, chunk, step)


def _finish_chunk(buffers: HostBuffers, chunk: UpdateChunk, step: Step) -> None:
    buffers.update(chunk, step)
    buffers.send_weights(chunk)


class HostBuffers:
    """Memory for one chunk: pinned for both directions, and float32 copies of moments in a lower precision."""

    def __init__(self, like: Tensor, elements: int) -> None:
        def allocate_pinned(dtype: torch.dtype) -> Tensor:
            return torch.empty(elements, dtype=dtype, pin_memory=like.is_cuda)

        self._arriving, self._leaving = allocate_pinned(torch.float32), allocate_pinned(like.dtype)
        self._scratch = torch.empty(2, elements)
        self._arrived_event, self._left_event = (_make_event(like.device) for _ in range(2))

    def fetch(self, chunk: UpdateChunk, scale: float) -> None:
        """Start to copy the gradients to the host, scaled and in float32."""
        self._arriving[: chunk.main.numel()].copy_(chunk.gradient.float() * scale, non_blocking=True)
        self._arrived_event.record()

    def update(self, chunk: UpdateChunk, step: Step) -> None:
        """Wait for the gradients, and update main weights and moments with them."""
        self._arrived_event.synchronize()
        stored_moments = (chunk.first_moment, chunk.second_moment)
        first, second = (
            stored if stored.dtype is torch.float32 else copy[: stored.numel()].copy_(stored)
            for stored, copy in zip(stored_moments, self._scratch, strict=True)
        )
        step((chunk.main, self._arriving[: chunk.main.numel()], first, second), chunk.is_decayed)
        for stored, updated in zip(stored_moments, (first, second), strict=True):
            if updated is not stored:
                stored.copy_(updated)

    def send_weights(self, chunk: UpdateChunk) -> None:
        """Round the weights, and start to copy them to the device."""
        self._left_event.synchronize()
        leaving = self._leaving[: chunk.main.numel()].copy_(chunk.main)
        chunk.weight.copy_(leaving, non_blocking=True)
        self._left_event.record()


class _NoEvent:
    """Stands for an event where copies are waited for: between tensors that are both on the host."""

    def record(self) -> None:
        """Mark nothing: the copy has ended."""

    def synchronize(self) -> None:
        """Wait for nothing."""


def _make_event(device: torch.device) -> Any:
    return torch.cuda.Event() if device.type == "cuda" else _NoEvent()
