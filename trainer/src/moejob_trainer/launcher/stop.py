"""Requests to stop the launcher: signals become a number that the loop reads, and end its waiting."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterable
from multiprocessing.connection import wait


class StopRequested(Exception):
    """Asked to stop where there is nothing to save."""


class StopRequest:
    """SIGTERM and SIGINT alike. The first asks the ranks to save, the second ends them."""

    def __init__(self) -> None:
        self.times = 0
        # Python writes a byte for each signal into this pipe, which ends a wait at once. A full pipe must not block.
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    def listen_for_signals(self) -> None:
        """Take the signals of this process; its main thread must call it."""
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: self.request_stop())

    def request_stop(self) -> None:
        """Count a request to stop."""
        self.times += 1

    def wait(self, seconds: float, descriptors: Iterable[int] = ()) -> None:
        """Wait for a request to stop, for a descriptor that can be read, or for some seconds."""
        ready = wait([self._reader, *descriptors], seconds)
        if self._reader in ready:
            os.read(self._reader, 4096)

    def raise_if_requested(self) -> None:
        """Raise StopRequested after a request to stop."""
        if self.times:
            raise StopRequested
