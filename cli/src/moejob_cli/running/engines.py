"""Separate engines of a run: processes that outlive its attempts. Restarts every engine that ends, and no more."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moejob_api.recovery.engine_starts import LOG_BYTES, EngineStarts
from moejob_cli.running.launchers import EngineOrder

# An engine that cannot start fails within seconds.
_AGAIN_SECONDS = 10.0
_END_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class FailedStart:
    """The message of an engine that cannot start. If the job is the reason, no other try can help."""

    message: str
    is_misconfigured: bool


class RunEngines:
    """The engines of one run, from its first launcher to its last."""

    def __init__(
        self, python: Path, orders: Sequence[EngineOrder], logs: Path, again_seconds: float = _AGAIN_SECONDS
    ) -> None:
        self._again_seconds = again_seconds
        self._python, self._orders, self._logs = python, orders, logs
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._due_at: dict[int, float] = {}
        self._began_at: dict[int, float] = {}
        self._starts = {order.index: EngineStarts() for order in orders}
        self._ends = dict.fromkeys(self._starts, 0)

    @property
    def engine_ends(self) -> Mapping[int, int]:
        """The ends of each engine since ranks made their last step."""
        return self._ends

    def forget_ends(self) -> None:
        """Forget the ends of engines: ranks make steps."""
        self._ends = dict.fromkeys(self._starts, 0)

    def keep_running(self) -> list[str]:
        """Start engines that do not run; return a sentence about each engine that has ended."""
        sentences = []
        for order in self._orders:
            process = self._processes.get(order.index)
            if process is not None and process.poll() is not None:
                sentences.append(f"engine {order.index} ended with {process.returncode} and is started again")
                self._ends[order.index] += 1
                ran_seconds = time.monotonic() - self._began_at[order.index]
                self._starts[order.index] = self._starts[order.index].after_end(process.returncode, ran_seconds)
                self._forget_engine(order.index, process)
            if order.index not in self._processes and time.monotonic() >= self._due_at.get(order.index, 0.0):
                self._processes[order.index] = self._start_engine(order)
        return sentences

    def failed_start(self) -> FailedStart | None:
        """Return the failed start of a hopeless engine, which the job would wait for in vain."""
        for index, starts in self._starts.items():
            if starts.is_hopeless:
                log_tail = self._log_path(index).read_bytes()[-LOG_BYTES:]
                return FailedStart(starts.refusal_message(index, log_tail), starts.is_misconfigured)
        return None

    def end_engines(self) -> None:
        """End all engines: SIGTERM first, SIGKILL after a while."""
        for process in self._processes.values():
            process.send_signal(signal.SIGTERM)
        until = time.monotonic() + _END_SECONDS
        for index, process in list(self._processes.items()):
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, until - time.monotonic()))
            self._forget_engine(index, process)

    def _forget_engine(self, index: int, process: subprocess.Popen[bytes]) -> None:
        # The engine's workers hold memory and the port, and may outlive the engine.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        del self._processes[index]
        self._due_at[index] = time.monotonic() + self._again_seconds

    def _start_engine(self, order: EngineOrder) -> subprocess.Popen[bytes]:
        # moejob_rollout ends with this process.
        self._began_at[order.index] = time.monotonic()
        with self._log_path(order.index).open("ab") as log:
            return subprocess.Popen(
                [self._python, "-m", "moejob_rollout"],
                env=order.environment,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _log_path(self, index: int) -> Path:
        return self._logs / f"engine-{index}.log"
