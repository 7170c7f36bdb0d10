"""A tracker backend in its own thread: it reports and counts an error, which never holds up the run."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable

from moejob_trainer.runtime.user_lines import to_stderr
from moejob_trainer.tracking.backends import StepNumbers, TrackerBackend

# Hours of steps: a backend further behind than this will not catch up.
MOST_WAITING = 10_000


class BackgroundBackend:
    """Sends numbers to one backend. The thread opens the backend, too: opening imports packages and asks servers."""

    def __init__(
        self,
        name: str,
        open_backend: Callable[[], TrackerBackend],
        write_line: Callable[[str], None] = to_stderr,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self.name, self._open_backend, self._write_line, self._most_waiting = (
            name,
            open_backend,
            write_line,
            most_waiting,
        )
        # Steps whose numbers the backend did not get.
        self.lost = 0
        self._waiting: deque[StepNumbers] = deque()
        self._changed = threading.Condition()
        self._is_closing = self._has_failed = self._has_reported = False
        # A daemon: a process does not wait for it to end.
        self._thread = threading.Thread(target=self._send_all, name=f"tracking-{name}", daemon=True)
        self._thread.start()

    def write(self, numbers: StepNumbers) -> None:
        """Put the numbers in the queue, or drop them if it is full."""
        with self._changed:
            has_room = len(self._waiting) < self._most_waiting
            if has_room:
                self._waiting.append(numbers)
                self._changed.notify()
        if not has_room:
            self._count_lost(f"it is {self._most_waiting} steps behind")

    def begin_close(self, *, has_failed: bool) -> None:
        """Announce the end: no numbers follow."""
        with self._changed:
            self._is_closing, self._has_failed = True, has_failed
            self._changed.notify()

    def wait(self, deadline: float) -> None:
        """Wait until all numbers are sent, or until the deadline of the monotonic clock; report lost steps."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            with self._changed:
                self.lost += len(self._waiting)
            self._write_line(f"{self.name} did not finish in time and was left behind")
        if self.lost:
            self._write_line(f"{self.name} lacks the numbers of {self.lost} steps; {_COMPLETE_LOG}")

    def _send_all(self) -> None:
        try:
            backend = self._open_backend()
        except Exception as error:  # noqa: BLE001 a backend never stops a run
            self._count_lost(_error_reason(error), steps=0)
            self._lose_all()
            return
        while (numbers := self._next_numbers()) is not None:
            self._try_sending(lambda: backend.write(numbers), steps=1)
        self._try_sending(lambda: backend.close(has_failed=self._has_failed), steps=0)

    def _lose_all(self) -> None:
        while self._next_numbers() is not None:
            self._count_lost("", steps=1)

    def _next_numbers(self) -> StepNumbers | None:
        """Return the step that has waited longest; None when all is sent and the run has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            return self._waiting.popleft() if self._waiting else None

    def _try_sending(self, send: Callable[[], None], steps: int) -> None:
        try:
            send()
        except Exception as error:  # noqa: BLE001 a backend never stops a run
            self._count_lost(_error_reason(error), steps)

    def _count_lost(self, reason: str, steps: int = 1) -> None:
        with self._changed:
            self.lost += steps
            is_first_loss, self._has_reported = not self._has_reported, True
        if is_first_loss:
            self._write_line(f"{self.name}: {reason}; the run continues, and {_COMPLETE_LOG}")


_COMPLETE_LOG = "steps.jsonl in the run folder has all of them"


def _error_reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return (
            f"this image has no package {error.name}; install it in the image or remove the tracker from spec.tracking"
        )
    return f"{type(error).__name__}: {error}"
