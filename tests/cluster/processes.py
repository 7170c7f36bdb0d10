"""Child processes that never outlive us; knows nothing of what they are."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from cluster.waiting import LONGEST_SECONDS, until

TAIL_LINES = 25
# Between a signal and the end of a process group, under load.
END_SECONDS = 30


class EndedError(Exception):
    """A process that should run has ended."""


class Process:
    """One program in a process group of its own, its output in a log; it can be stopped and started again.

    The kernel ends it when we end, however we end (setpriv --pdeathsig). It takes the end of the thread that started it
    for ours: start processes from the main thread.
    """

    def __init__(self, name: str, command: Sequence[str | Path], folder: Path) -> None:
        self.name = name
        self.log = folder / f"{name}.log"
        self._command = ("setpriv", "--pdeathsig", "KILL", "--", *command)
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        """The process that runs now; None when none does."""
        return self._child.pid if self._child is not None and self._ending() is None else None

    def start(self) -> None:
        """Run it, if it does not run."""
        if self.pid is not None:
            return
        self.stop()
        with self.log.open("ab") as log:
            self._child = subprocess.Popen(
                self._command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def expect_running(self) -> None:
        """Say the last lines of the log when it has ended by itself."""
        if self.pid is None:
            raise EndedError(f"{self.name} ended with {self._ending()}; {self._tail()}")

    def wait_until(self, ready: Callable[[], bool], seconds: float = LONGEST_SECONDS) -> None:
        """Return when `ready` holds; say the last lines of the log when it does not in time."""

        def ready_and_alive() -> bool:
            self.expect_running()
            return ready()

        until(ready_and_alive, seconds=seconds, waiting_for=lambda: f"{self.name} ready; {self._tail()}")

    def stop(self) -> None:
        """End it and all it started, at once: nothing that tests leave behind is worth a graceful end."""
        if self._child is None:
            return
        # A leader that has ended keeps its number until it is waited for: this reaches what it left behind, no other.
        os.killpg(self._child.pid, signal.SIGKILL)
        self._child.wait(END_SECONDS)
        self._child = None

    def _ending(self) -> int | None:
        """Exit status or signal of a process that has ended by itself; None while it runs."""
        if self._child is None:
            return None
        ended = os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
        return ended.si_status if ended else None

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()[-TAIL_LINES:]
        return "\n".join([f"the end of {self.log}:", *lines])
