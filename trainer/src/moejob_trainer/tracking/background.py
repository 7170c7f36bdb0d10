"""A sink in a thread of its own: what it raises is told once and counted, and nobody waits for it for long."""

from __future__ import annotations

import sys
import threading
import time
from collections import deque
from collections.abc import Callable

from moejob_trainer.tracking.sinks import Numbers, Sink

# Hours of steps; a sink that is further behind will not catch up.
MOST_WAITING = 10_000


def to_stderr(line: str) -> None:
    """Where a rank's words go that are for the user."""
    sys.stderr.write(f"{line}\n")


class Background:
    """Sends to one sink. `opened` makes it, in the thread: that may already import packages and ask servers."""

    def __init__(
        self,
        name: str,
        opened: Callable[[], Sink],
        say: Callable[[str], None] = to_stderr,
        most_waiting: int = MOST_WAITING,
    ) -> None:
        self.name, self._opened, self._say, self._most_waiting = name, opened, say, most_waiting
        # Steps of which the sink does not have the numbers.
        self.lost = 0
        self._waiting: deque[Numbers] = deque()
        self._changed = threading.Condition()
        self._is_closing = self._has_failed = self._has_spoken = False
        # A daemon: a process does not wait for it to end.
        self._thread = threading.Thread(target=self._work, name=f"tracking-{name}", daemon=True)
        self._thread.start()

    def write(self, numbers: Numbers) -> None:
        """Puts the numbers in the queue, or loses them where there is no room."""
        with self._changed:
            has_room = len(self._waiting) < self._most_waiting
            if has_room:
                self._waiting.append(numbers)
                self._changed.notify()
        if not has_room:
            self._lose(f"it is {self._most_waiting} steps behind")

    def begin_close(self, *, has_failed: bool) -> None:
        """Nothing more will come."""
        with self._changed:
            self._is_closing, self._has_failed = True, has_failed
            self._changed.notify()

    def wait(self, deadline: float) -> None:
        """Until everything is sent, or that moment of the monotonic clock. Says what is missing."""
        self._thread.join(max(0.0, deadline - time.monotonic()))
        if self._thread.is_alive():
            with self._changed:
                self.lost += len(self._waiting)
            self._say(f"{self.name} did not finish in time and was left behind")
        if self.lost:
            self._say(f"{self.name} lacks the numbers of {self.lost} steps; {_COMPLETE}")

    def _work(self) -> None:
        try:
            sink = self._opened()
        except Exception as error:  # noqa: BLE001 a sink never stops a run
            self._lose(_reason(error), steps=0)
            self._lose_all()
            return
        while (numbers := self._next()) is not None:
            self._tried(lambda: sink.write(numbers), steps=1)
        self._tried(lambda: sink.close(has_failed=self._has_failed), steps=0)

    def _lose_all(self) -> None:
        while self._next() is not None:
            self._lose("", steps=1)

    def _next(self) -> Numbers | None:
        """What has waited longest; None when all is sent and nothing more will come."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closing)
            return self._waiting.popleft() if self._waiting else None

    def _tried(self, send: Callable[[], None], steps: int) -> None:
        try:
            send()
        except Exception as error:  # noqa: BLE001 a sink never stops a run
            self._lose(_reason(error), steps)

    def _lose(self, why: str, steps: int = 1) -> None:
        with self._changed:
            self.lost += steps
            speaks, self._has_spoken = not self._has_spoken, True
        if speaks:
            self._say(f"{self.name}: {why}; the run goes on, and {_COMPLETE}")


_COMPLETE = "steps.jsonl in the run folder has all of them"


def _reason(error: Exception) -> str:
    if isinstance(error, ModuleNotFoundError):
        return f"this image has no package {error.name}; install it in the image or take the sink out of spec.tracking"
    return f"{type(error).__name__}: {error}"
