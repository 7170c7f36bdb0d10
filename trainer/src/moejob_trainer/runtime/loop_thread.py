"""An event loop in a thread of its own: connections and requests must not wait for what the process does."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from contextlib import suppress
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


class LoopThread:
    """An event loop that runs until it is stopped or closed."""

    def __init__(self, name: str = "connections") -> None:
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(_ignore_cancelled)
        self._thread = Thread(target=self._loop.run_forever, name=name, daemon=True)
        self._thread.start()

    def run(self, work: Coroutine[Any, Any, T], seconds: float | None = None) -> T:
        """Return the result of the coroutine; TimeoutError when it takes longer. From any other thread."""
        return asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, seconds), self._loop).result()

    async def await_result(self, work: Coroutine[Any, Any, T]) -> T:
        """Run in this thread's loop and await the result in another one, whose cancellation cancels it here."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def stop(self) -> None:
        """End all connections, without waiting."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end_tasks)

    def close(self, close_resources: Callable[[], Coroutine[Any, Any, None]] | None = None) -> None:
        """Cancel what still runs, close what it used, and end the thread. A second call does nothing."""
        if self._loop.is_closed():
            return
        self.run(_cancel_other_tasks())
        if close_resources is not None:
            self.run(close_resources())
        self.stop()
        self._thread.join()
        self._loop.close()

    def _end_tasks(self) -> None:
        tasks = asyncio.all_tasks(self._loop)
        for task in tasks:
            task.cancel()
        # Tasks close their connections when they end, and a loop that stops before leaves them open.
        all_ended = asyncio.gather(*tasks, return_exceptions=True)
        all_ended.add_done_callback(lambda _: self._loop.stop())


async def _cancel_other_tasks() -> None:
    other_tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in other_tasks:
        task.cancel()
    await asyncio.gather(*other_tasks, return_exceptions=True)


def _ignore_cancelled(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    # Before Python 3.12 a server reports the requested end of a connection's task as an error.
    if not isinstance(context.get("exception"), asyncio.CancelledError):
        loop.default_exception_handler(context)
