"""Exchanges beside the computation: on a separate stream of a GPU, in the threads of gloo on a CPU.

The host never waits for a GPU here. An exchange runs after all work that was launched before it; work that is launched
after the call of its `Finish` runs after the exchange.
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
    """One queue of exchanges. Memory that they allocate belongs to its stream, which uses it again in order."""

    def __init__(self, device: torch.device) -> None:
        # With priority: else its short kernels would wait for the long ones of the computation to end.
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None

    def start_exchange(self, start: Start, on_arrival: Callable[[Tensor], None]) -> Finish:
        """Start an exchange; call `on_arrival` with its rows: on a GPU when they arrive, on a CPU at the finish."""
        if self._stream is None:
            return partial(_finish_exchange, start(), on_arrival)
        return self.run(lambda: _finish_exchange(start(), on_arrival))

    def run(self, work: Callable[[], None]) -> Finish:
        """Run a function on the stream, after all work launched so far; on a CPU at once."""
        if self._stream is None:
            work()
            return _do_nothing
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            work()
            done_event = self._stream.record_event()
        return partial(_wait_for_event, done_event, self._stream.device)


def _finish_exchange(pending: PendingCollective, on_arrival: Callable[[Tensor], None]) -> None:
    on_arrival(pending.wait())


def _wait_for_event(event: torch.cuda.Event, device: torch.device) -> None:
    torch.cuda.current_stream(device).wait_event(event)


def _do_nothing() -> None:
    """Do nothing: a CPU has run the function already."""
