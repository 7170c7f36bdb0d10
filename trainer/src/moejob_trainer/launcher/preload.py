"""The fork server as its launcher sees it: it starts, imports, lives, and answers requests to start a process.

Imports may take any time, from a slow volume or on busy cores. A server that ends meanwhile, or neither computes nor
reads, is started again. No other part would notice: there is no rank yet.

Python's fork server passes over an ImportError of its preload without a word, and then waits for requests, so a preload
that cannot begin is known by that state.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing import forkserver
from pathlib import Path

from moejob_trainer.launcher.fork_server import LAUNCHER, PRELOAD, WARM
from moejob_trainer.launcher.log import LauncherLog
from moejob_trainer.launcher.stop import StopRequest
from moejob_trainer.runtime.activity import has_worked, read_activity

log = LauncherLog()

# Once could be the kernel, for memory.
_STARTS = 3
_POLL_SECONDS = 0.05
# A process that the kernel cannot end is not waited for longer than this.
_KILL_SECONDS = 20.0
# Between two readings of the server's work.
_ACTIVITY_SECONDS = 1.0
PRELOADED = "moejob_trainer.launcher.fork_server"
# A traceback's last frames and its error, of which a termination message has room.
_TRACEBACK_LINES = 7
_TRACEBACK_SECONDS = 60.0


class LostForkServer(Exception):
    """The fork server cannot import, or ended or stood still each time that it was started."""


class Preload:
    """The imports of the fork server of this process."""

    def __init__(self, warm: Path, modules: Sequence[str], idle_seconds: float) -> None:
        self._warm, self._modules, self._idle_seconds = warm, modules, idle_seconds
        os.environ[PRELOAD], os.environ[WARM] = ",".join(modules), str(warm)
        os.environ[LAUNCHER] = str(os.getpid())
        forkserver.ensure_running()

    def wait(self, stop: StopRequest) -> None:
        """Wait until the imports are done, in another server where one is lost; at once where they are."""
        problem = None
        for _ in range(_STARTS):
            # One that died with the ranks of the round before is started again.
            forkserver.ensure_running()
            problem = self._await_imports(stop)
            if problem is None:
                return
            log.warning("the fork server is started again", problem=problem)
        raise LostForkServer(
            f"the process that imports {', '.join(self._modules)} {problem}, {_STARTS} times in a row; raise "
            "resources.memory if the pod is short of it, or look at the volume that holds its Python"
        )

    @contextmanager
    def expect_answer(self) -> Iterator[None]:
        """Start a process within; a server that does not answer is killed, for its launcher would wait for ever."""
        timer = threading.Timer(self._idle_seconds, _kill_server)
        timer.daemon = True
        timer.start()
        try:
            yield
        except (EOFError, OSError) as error:
            raise LostForkServer(f"the fork server did not start a process: {error!r}") from error
        finally:
            timer.cancel()

    def close(self) -> None:
        """End the server. A server that hangs owes this process the ends of children, and would keep it from ending."""
        _kill_server()

    @property
    def server_pid(self) -> int:
        """Return the process that has done the imports."""
        return int(self._warm.read_text())

    def _await_imports(self, stop: StopRequest) -> str | None:
        """Wait for the imports; return the reason if they cannot finish, in which case the server is dead."""
        pid = _server_pid()
        activity, read_at = read_activity(pid), time.monotonic()
        worked_at = read_at
        while not self._is_warm(pid):
            stop.raise_if_requested()
            stop.wait(_POLL_SECONDS)
            if (ending := _server_ending(pid)) is not None:
                return f"{ending} meanwhile"
            # In this order: a server writes first that it is warm.
            if _awaits_requests(pid) and not self._is_warm(pid):
                raise LostForkServer(
                    f"the fork server of {sys.executable} cannot import {PRELOADED}: {_read_traceback()}"
                )
            now = time.monotonic()
            if now - read_at < _ACTIVITY_SECONDS:
                continue
            before, activity = activity, read_activity(pid)
            worked_at = now if has_worked(before, activity, now - read_at) else worked_at
            read_at = now
            if now - worked_at >= self._idle_seconds:
                _kill_server()
                self._await_ending(pid)
                return f"neither computed nor read anything for {self._idle_seconds:.0f} s"
        return None

    def _await_ending(self, pid: int) -> None:
        """Wait until a killed server is gone: until then it would count as the running server."""
        until = time.monotonic() + _KILL_SECONDS
        while _server_ending(pid) is None and time.monotonic() < until:
            time.sleep(_POLL_SECONDS)

    def _is_warm(self, pid: int) -> bool:
        try:
            return int(self._warm.read_text()) == pid
        except (FileNotFoundError, ValueError):
            return False


def _server_pid() -> int:
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined] # noqa: SLF001 there is no public way to ask
    return int(pid)


def _server_ending(pid: int) -> str | None:
    """Return how the server has ended; that is left to be seen by ensure_running, which starts it again."""
    try:
        result = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return "has ended"
    if result is None:
        return None
    if result.si_code == os.CLD_EXITED:
        return f"ended with exit code {result.si_status}"
    return f"was killed by signal {result.si_status}"


def _awaits_requests(pid: int) -> bool:
    """Return whether the server has left its preload behind: only then it handles the ends of children."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return False
    handled = next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)
    return bool(handled >> (signal.SIGCHLD - 1) & 1)


def _read_traceback() -> str:
    """Repeat the first import of a server in another process; return the end of its traceback."""
    environ = {name: value for name, value in os.environ.items() if name != WARM}
    command = [sys.executable, "-c", f"import {PRELOADED}"]
    try:
        ended = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TRACEBACK_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return f"a second try did not end within {_TRACEBACK_SECONDS:.0f} s"
    lines = ended.stderr.decode(errors="replace").splitlines()[-_TRACEBACK_LINES:]
    return "\n".join(lines) if ended.returncode else "a second try could; the files of the package may have changed"


def _kill_server() -> None:
    with suppress(ProcessLookupError):
        os.kill(_server_pid(), signal.SIGKILL)
