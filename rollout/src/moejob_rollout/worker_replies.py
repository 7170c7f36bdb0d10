"""Replies of workers, each taken for the call that it answers.

vLLM 0.32 asks all workers of an engine, and reads their replies one after another up to the first that is a failure.
Later replies stay in their queues, and the next calls read them as their own: where one of two workers has failed to
join the trainer, an engine refuses updates because of earlier errors, and reports weights as loaded while a worker
still loads them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial, wraps
from typing import Any

from vllm.v1.executor.multiproc_executor import MultiprocExecutor, WorkerProc

# The wait for one reply, before the next worker's queue is read.
_LOOK_SECONDS = 0.02
_SUCCESS = WorkerProc.ResponseStatus.SUCCESS


class Replies:
    """The queue of one worker, without the replies to calls that failed before they were read."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._unwanted = 0
        self._taken: Any = None
        self.read = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def dequeue(self, timeout: float | None = None) -> Any:
        """Return the reply to the present call, after those to all calls before it."""
        reply, self._taken = self._taken or self._dequeued(timeout), None
        self.read += 1
        return reply

    def is_there(self, seconds: float) -> bool:
        """Wait for the reply to the present call, and keep it."""
        with suppress(TimeoutError):
            self._taken = self._taken or self._dequeued(seconds)
        return self._taken is not None

    @property
    def is_failure(self) -> bool:
        """Return whether the reply that is there says that the call failed."""
        return self._taken is not None and self._taken[0] != _SUCCESS

    def _dequeued(self, timeout: float | None) -> Any:
        while self._unwanted:
            self._queue.dequeue(timeout=timeout)
            self._unwanted -= 1
        return self._queue.dequeue(timeout=timeout)

    def leave_out(self) -> None:
        """Leave out the reply to the present call."""
        if self._taken is None:
            self._unwanted += 1
        self._taken = None


def keep_in_step() -> None:
    """Keep a call that fails on one worker from mixing up the replies to later calls."""
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
    def in_step(self: Any, method: Any, timeout: float | None = None, *args: Any, **kwargs: Any) -> Any:
        non_block = kwargs.pop("non_block", False)
        future = original(self, method, timeout, *args, non_block=True, **kwargs)
        # A call that wants the reply of one worker gets no other.
        is_of_one = kwargs.get("unique_reply_rank") is not None and not _merges(kwargs)
        if not is_of_one:
            future.get_response = partial(read_all, self.response_mqs, future.get_response, timeout)
        return future if non_block else future.result()

    MultiprocExecutor.collective_rpc = in_step


def _merges(kwargs: dict[str, Any]) -> bool:
    return any(kwargs.get(name) for name in ("kv_output_aggregator", "ec_output_aggregator"))


def read_all(workers: Sequence[Replies], read: Callable[[], Any], timeout: float | None) -> Any:
    """Read a reply of each worker; after an early end, no later call gets the unread replies."""
    before = [worker.read for worker in workers]
    try:
        if timeout is None:
            _await_all_or_a_failure(workers)
        return read()
    except (RuntimeError, TimeoutError):
        for worker, count in zip(workers, before, strict=True):
            if worker.read == count:
                worker.leave_out()
        raise


def _await_all_or_a_failure(workers: Sequence[Replies]) -> None:
    """Return when the replies of all are there; RuntimeError, in vLLM's words, as soon as one is a failure."""
    waiting = workers
    while waiting:
        waiting = [worker for worker in waiting if not worker.is_there(_LOOK_SECONDS)]
        for worker in workers:
            if worker.is_failure:
                _, reason = worker.dequeue()
                raise RuntimeError(f"Worker failed with error '{reason}', please check the stack trace above")
