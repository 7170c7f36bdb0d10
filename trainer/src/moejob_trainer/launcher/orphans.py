"""Processes whose parent has died: the launcher inherits them, as process 1 of a pod or because it asks for them.

A data worker that outlives its rank would keep the GPU's memory or a port from the next one.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36
# A process that the kernel cannot end is left behind.
_REAP_SECONDS = 5.0


class Orphans:
    """Children of this process that it has not started itself. Made once the helpers of multiprocessing run.

    spared: children that come and go, and that another part ends.
    """

    def __init__(self, spared_children: Callable[[], frozenset[int]] = frozenset) -> None:
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self._known_children, self._spared_children = frozenset(_child_pids()), spared_children

    def reap(self) -> None:
        """Reap the orphans that have ended."""
        for pid in self._present_orphans():
            with suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)

    def kill(self) -> None:
        """Kill and reap all of them; killing one may leave its own children to us."""
        until = time.monotonic() + _REAP_SECONDS
        while (present := self._present_orphans()) and time.monotonic() < until:
            for pid in present:
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self.reap()

    def _present_orphans(self) -> frozenset[int]:
        return frozenset(_child_pids()) - self._known_children - self._spared_children()


def _child_pids() -> set[int]:
    pids: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        # A thread may end while it is looked at.
        with suppress(OSError):
            pids |= {int(pid) for pid in (task / "children").read_text().split()}
    return pids
