"""Replies of workers, each taken for the call that it answers.

vLLM 0.32 asks all workers of an engine, and reads their replies one after another up to the first that is a failure.
The replies behind it stay in their queues and are read as those to the next calls: where one of two workers has failed
to join the trainer, an engine refuses updates for what was wrong with earlier ones, and calls weights loaded while a
worker still loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor


class Replies:
    """The queue of one worker, without the replies to calls that failed before they were read."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._unwanted = 0
        self.read = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def dequeue(self, timeout: float | None = None) -> Any:
        """Return the reply to the call that is read now, once the worker has done all before it."""
        while self._unwanted:
            self._queue.dequeue(timeout=timeout)
            self._unwanted -= 1
        reply = self._queue.dequeue(timeout=timeout)
        self.read += 1
        return reply

    def leave_out(self) -> None:
        """Leave out one reply more."""
        self._unwanted += 1


def keep_in_step() -> None:
    """Let a call that fails on one worker take nothing from the calls after it."""
    _count_replies()
    _leave_out_unread()


def _count_replies() -> None:
    original = MultiprocExecutor._init_executor  # noqa: SLF001  # it has no public name

    @wraps(original)
    def counted(self: Any) -> None:
        original(self)
        self.response_mqs = [Replies(queue) for queue in self.response_mqs]

    MultiprocExecutor._init_executor = counted  # noqa: SLF001


def _leave_out_unread() -> None:
    original = MultiprocExecutor.collective_rpc

    @wraps(original)
    def in_step(self: Any, *args: Any, non_block: bool = False, **kwargs: Any) -> Any:
        future = original(self, *args, non_block=True, **kwargs)
        # A call that wants the reply of one worker gets no other.
        is_of_one = kwargs.get("unique_reply_rank") is not None and not _merges(kwargs)
        if not is_of_one:
            future.get_response = partial(read_all, self.response_mqs, future.get_response)
        return future if non_block else future.result()

    MultiprocExecutor.collective_rpc = in_step


def _merges(kwargs: dict[str, Any]) -> bool:
    return any(kwargs.get(name) for name in ("kv_output_aggregator", "ec_output_aggregator"))


def read_all(workers: Sequence[Replies], read: Callable[[], Any]) -> Any:
    """Read a reply of each worker; where that ends early, those that were not read belong to no later call."""
    before = [worker.read for worker in workers]
    try:
        return read()
    except (RuntimeError, TimeoutError):
        for worker, count in zip(workers, before, strict=True):
            if worker.read == count:
                worker.leave_out()
        raise
