"""Keeps the next batches ready while the model works on this one. Knows nothing of what a batch is."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Generic, Self, TypeVar

Item = TypeVar("Item")


class _EndOfSource:
    """Stands for the end of the source, whose items may be anything."""


_END = _EndOfSource()


class PrefetchIterator(Generic[Item]):
    """An iterator that runs ahead of its reader, in a thread that ends with the context.

    A thread is enough: assembling a batch is copying from mapped files. What the source raises reaches the reader, now
    and at every further try.
    """

    def __init__(self, source: Iterator[Item], ahead: int = 2) -> None:
        self._source = source
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._ready = deque[Future[Item | _EndOfSource]]()
        for _ in range(ahead):
            self._request_item()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Item:
        # Removed only after it was read: an error stays first, and so does the end.
        item = self._ready[0].result()
        if isinstance(item, _EndOfSource):
            raise StopIteration
        self._ready.popleft()
        self._request_item()
        return item

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _request_item(self) -> None:
        self._ready.append(self._pool.submit(next, self._source, _END))
