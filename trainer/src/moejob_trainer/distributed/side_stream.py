"""Exchanges beside the computation: on a stream of their own on a GPU, in the threads of gloo on a CPU.

The host never waits for a GPU here. What is begun comes behind everything that was computed before it, and what is
computed after its `Finish` was called comes behind it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from moejob_trainer.distributed.collectives import PendingCollective

Start = Callable[[], PendingCollective]
Finish = Callable[[], None]


class SideStream:
    """One queue of exchanges. Memory that they allocate belongs to its stream, and is used again in its order."""

    def __init__(self, device: torch.device) -> None:
        # Short kernels between long ones: without priority they would wait for room on the multiprocessors.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def begin(self, start: Start, then: Callable[[Tensor], None]) -> Finish:
        """Begin an exchange, and do `then` with its rows as soon as they are there: on a CPU when it is finished."""
        if self._stream is None:
            return partial(_finish, start(), then)
        return self.run(lambda: _finish(start(), then))

    def run(self, act: Callable[[], None]) -> Finish:
        """Do something behind all that was begun and computed; on a CPU at once."""
        if self._stream is None:
            act()
            return _nothing
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            act()
            is_done = self._stream.record_event()
        return partial(_follow, is_done, self._stream.device)


def _finish(pending: PendingCollective, then: Callable[[Tensor], None]) -> None:
    then(pending.wait())


def _follow(event: torch.cuda.Event, device: torch.device) -> None:
    torch.cuda.current_stream(device).wait_event(event)


def _nothing() -> None:
    """It is done."""
