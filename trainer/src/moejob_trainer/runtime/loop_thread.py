"""An event loop in a thread of its own, in which requests go on while the main thread trains."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop that runs until it is closed."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run in this thread's loop and wait for the result. From any other thread."""
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()

    async def await_result(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run in this thread's loop and await the result in another one, whose cancellation cancels it here."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(coroutine, self._loop))

    def close(self, close_resources: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel what still runs, close what it used, and end the thread. A second call does nothing."""
        if self._loop.is_closed():
            return
        self.run(_cancel_other_tasks())
        if close_resources is not None:
            self.run(close_resources())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


async def _cancel_other_tasks() -> None:
    other_tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in other_tasks:
        task.cancel()
    await asyncio.gather(*other_tasks, return_exceptions=True)
