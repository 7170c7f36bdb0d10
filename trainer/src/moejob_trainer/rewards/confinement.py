"""The bounds of a process that scores: what it may take, what it may know, and how it is interrupted.

An answer is a stranger's text. `9**9**9**9`, a million digits or a pattern that backtracks cost the author nothing, so
a built-in reward gives each answer seconds of a processor, two GiB of addresses and no other process.
"""

from __future__ import annotations

import ctypes
import resource
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType

from moejob_api.contract.pods import Environment
from moejob_api.job.grpo import Reward

INTERRUPT = signal.SIGUSR1
# Seconds of a processor for one answer to a built-in reward; math-verify usually takes some hundredths.
ANSWER_SECONDS = 5
_MOST_BYTES = 2 * 2**30
_PR_SET_PDEATHSIG = 1
# All that Python needs to start where its parent did.
_BUILT_IN_NEEDS = ("PATH", "HOME", "TMPDIR", "LANG", "LC_ALL", "PYTHONPATH", "PYTHONHOME", "LD_LIBRARY_PATH")


class Interrupted(BaseException):
    """The time is up. It is no Exception, because a user's function may catch every Exception."""


class Interruption:
    """Raises Interrupted in the main thread, only while something is scored: never between two batches."""

    def __init__(self) -> None:
        self._is_armed = False

    def handle_signals(self) -> None:
        """Take the signals of the parent, and of this process's own timer."""
        signal.signal(INTERRUPT, self._raise_interrupted)
        signal.signal(signal.SIGPROF, self._raise_interrupted)

    @contextmanager
    def allow_interrupts(self, seconds: float | None = None) -> Iterator[None]:
        """Let the parent interrupt the block, and the kernel after these seconds of a processor."""
        self._is_armed = True
        if seconds is not None:
            signal.setitimer(signal.ITIMER_PROF, seconds)
            # Ends the process: code in C that takes as long again does not let Python raise.
            signal.setitimer(signal.ITIMER_VIRTUAL, 2 * seconds)
        try:
            yield
        finally:
            self._is_armed = False
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_VIRTUAL, 0)

    def _raise_interrupted(self, _signal: int, _frame: FrameType | None) -> None:
        if self._is_armed:
            self._is_armed = False
            raise Interrupted


def worker_environment(reward: Reward, environ: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a reward's process: without the job's secret, and for built-in rewards without any."""
    if reward.module is None:
        return {name: environ[name] for name in _BUILT_IN_NEEDS if name in environ}
    secrets = {Environment.SECRET.value, Environment.SPEC.value}
    return {name: value for name, value in environ.items() if name not in secrets}


def end_with_parent() -> None:
    """Let the kernel end this process when its parent ends, and write no dump of its memory."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def confine_built_in() -> None:
    """Bound memory and processes of a built-in reward, once all that it needs is imported."""
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    # No further process or thread, unless the user is root.
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
