"""Owns an event loop whose clock jumps to whatever is awaited next: hours of waiting pass at once, and exactly.

For code that waits for time and for itself, not for sockets, files or threads.
"""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class NothingWillHappenError(AssertionError):
    """Everything waits, and for nothing that time could bring."""


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Starts at 0 and never sleeps."""

    def __init__(self) -> None:
        self.seconds = 0.0
        super().__init__(_Jumping(self))

    def time(self) -> float:
        return self.seconds


class _Jumping(selectors.SelectSelector):
    def __init__(self, loop: VirtualTimeLoop) -> None:
        super().__init__()
        self._loop = loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise NothingWillHappenError
        self._loop.seconds += max(0.0, timeout)
        return super().select(0)


def run_virtually(main: Coroutine[Any, Any, Result]) -> Result:
    """Return what a coroutine returns, however long it takes in its own time."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(main)
