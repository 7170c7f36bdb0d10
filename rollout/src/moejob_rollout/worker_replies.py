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


class WorkerReplies:
    """The queue of one worker, without the replies to calls that failed before they were read."""

    def __init__(self, queue: Any) -> None:
        self._queue = queue
        self._unwanted = 0
        self._reply: Any = None
        self.read_count = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._queue, name)

    def dequeue(self, timeout: float | None = None) -> Any:
        """Return the reply to the present call, after those to all calls before it."""
        reply, self._reply = self._reply or self._dequeue_wanted(timeout), None
        self.read_count += 1
        return reply

    def has_reply(self, seconds: float) -> bool:
        """Wait for the reply to the present call, and keep it."""
        with suppress(TimeoutError):
            self._reply = self._reply or self._dequeue_wanted(seconds)
        return self._reply is not None

    @property
    def is_failure(self) -> bool:
        """Return whether the reply that is there says that the call failed."""
        return self._reply is not None and self._reply[0] != _SUCCESS

    def _dequeue_wanted(self, timeout: float | None) -> Any:
        while self._unwanted:
            self._queue.dequeue(timeout=timeout)
            self._unwanted -= 1
        return self._queue.dequeue(timeout=timeout)

    def leave_out_reply(self) -> None:
        """Leave out the reply to the present call."""
        if self._reply is None:
            self._unwanted += 1
        self._reply = None


def keep_in_step() -> None:
    """Keep a call that fails on one worker from mixing up the replies to later calls."""
    _count_replies()
    _leave_out_unread()


def _count_replies() -> None:
    original = MultiprocExecutor._init_executor  # noqa: SLF001  # it has no public name

    @wraps(original)
    def init_executor(self: Any) -> None:
        original(self)
        self.response_mqs = [WorkerReplies(queue) for queue in self.response_mqs]

    MultiprocExecutor._init_executor = init_executor  # noqa: SLF001


def _leave_out_unread() -> None:
    original = MultiprocExecutor.collective_rpc

    @wraps(original)
    def call_in_step(self: Any, method: Any, timeout: float | None = None, *args: Any, **kwargs: Any) -> Any:
        non_block = kwargs.pop("non_block", False)
        future = original(self, method, timeout, *args, non_block=True, **kwargs)
        # A call that wants the reply of one worker gets no other.
        is_of_one = kwargs.get("unique_reply_rank") is not None and not _has_aggregator(kwargs)
        if not is_of_one:
            future.get_response = partial(read_all_replies, self.response_mqs, future.get_response, timeout)
        return future if non_block else future.result()

    MultiprocExecutor.collective_rpc = call_in_step


def _has_aggregator(kwargs: dict[str, Any]) -> bool:
    return any(kwargs.get(name) for name in ("kv_output_aggregator", "ec_output_aggregator"))


def read_all_replies(workers: Sequence[WorkerReplies], read_replies: Callable[[], Any], timeout: float | None) -> Any:
    """Read a reply of each worker; after an early end, no later call gets the unread replies."""
    counts_before = [worker.read_count for worker in workers]
    try:
        if timeout is None:
            _await_all_or_a_failure(workers)
        return read_replies()
    except (RuntimeError, TimeoutError):
        for worker, count in zip(workers, counts_before, strict=True):
            if worker.read_count == count:
                worker.leave_out_reply()
        raise


def _await_all_or_a_failure(workers: Sequence[WorkerReplies]) -> None:
    """Return when the replies of all are there; RuntimeError, in vLLM's words, as soon as one is a failure."""
    waiting = workers
    while waiting:
        waiting = [worker for worker in waiting if not worker.has_reply(_LOOK_SECONDS)]
        for worker in workers:
            if worker.is_failure:
                _, reason = worker.dequeue()
                raise RuntimeError(f"Worker failed with error '{reason}', please check the stack trace above")
