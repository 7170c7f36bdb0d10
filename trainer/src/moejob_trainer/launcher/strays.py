"""Processes whose parent has died: the launcher inherits them, as process 1 of a pod or because it asks for them.

A data worker that outlives its rank would keep the GPU's memory or a port from the next one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
# A process that the kernel cannot end is left behind.
_BURIAL_SECONDS = 5.0


class Strays:
    """Children of this process that it has not started itself. Made once the helpers of multiprocessing run."""

    def __init__(self) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._own = frozenset(_children())

    def reap(self) -> None:
        """Bury those that have ended."""
        for pid in self._present():
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def kill(self) -> None:
        """Kill and bury all of them; killing one may leave its own children to us."""
        until = time.monotonic() + _BURIAL_SECONDS
        while (present := self._present()) and time.monotonic() < until:
            for pid in present:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.reap()

    def _present(self) -> frozenset[int]:
        return frozenset(_children()) - self._own


def _children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        # A thread may end while it is looked at.
        with suppress(OSError):
            found |= {int(pid) for pid in (task / "children").read_text().split()}
    return found
