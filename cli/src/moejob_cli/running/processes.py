"""Launchers as processes of this machine: starts, asks, signals and reaps them. Decides nothing."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path

from pydantic import ValidationError

from moejob_api.contract.pods import HttpPath, PodProgress, TerminationMessage
from moejob_cli.running.folder import HeldRunFolder
from moejob_cli.running.launchers import LauncherOrder
from moejob_cli.running.recovery import PodReport

_ANSWER_SECONDS = 1.0
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
# At the second signal a launcher kills its ranks, writes its termination message and ends.
_ASK_AGAIN_SECONDS, _LONGEST_END_SECONDS = 1.0, 5.0
_LOOK_SECONDS = 0.05

# Without a proxy: all addresses are on this machine.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


@dataclass(frozen=True, slots=True)
class LauncherStarter:
    """The parts with which every launcher of a run is started."""

    python: Path
    folder: HeldRunFolder

    def start(self, order: LauncherOrder) -> Launcher:
        """Start a launcher."""
        return Launcher(order, self)


class Launcher:
    """One launcher that was started."""

    def __init__(self, order: LauncherOrder, launching: LauncherStarter) -> None:
        self.index = order.index
        logs = launching.folder.logs
        self._message_path = logs / f"pod-{order.index}.json"
        # The termination message of an earlier launcher must not be taken for this one's.
        self._message_path.unlink(missing_ok=True)
        self._url = f"http://{order.host}:{order.progress_port}{HttpPath.PROGRESS}"
        self._progress: PodProgress | None = None
        self._process = _start_launcher(order, launching, self._message_path)
        self._started_at = self._reported_at = time.monotonic()

    @property
    def pid(self) -> int:
        """Its process."""
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Return whether its process has not ended."""
        return self._process.poll() is None

    def read_report(self) -> PodReport:
        """Ask the launcher for its progress, wait a moment for the reply, and return its report."""
        code = self._process.poll()
        if code is None:
            self._read_progress()
        now = time.monotonic()
        return PodReport(
            self.index,
            code,
            None if code is None else self._read_termination_message(),
            self._progress,
            now - self._started_at,
            now - self._reported_at,
        )

    def send_signal(self, number: signal.Signals) -> None:
        """Signal it, if it still runs."""
        self._process.send_signal(number)

    def _read_progress(self) -> None:
        try:
            with _opener.open(self._url, timeout=_ANSWER_SECONDS) as answer:
                self._progress = PodProgress.model_validate_json(answer.read())
        except (OSError, HTTPException, ValidationError):
            # It does not serve yet, never will, or ended during the reply; recovery acts on a silence that lasts.
            return
        if self._progress.ranks:
            self._reported_at = time.monotonic()

    def _read_termination_message(self) -> TerminationMessage | None:
        try:
            return TerminationMessage.model_validate_json(self._message_path.read_bytes())
        except (OSError, ValidationError):
            return None


def end_launchers(launchers: Iterable[Launcher]) -> None:
    """End launchers and their ranks now; nothing is saved."""
    remaining = tuple(launchers)
    requests = (signal.SIGTERM, _ASK_AGAIN_SECONDS), (signal.SIGTERM, _LONGEST_END_SECONDS), (signal.SIGKILL, None)
    for ask, seconds in requests:
        for launcher in remaining:
            launcher.send_signal(ask)
        _wait_for(remaining, seconds)


def _wait_for(launchers: tuple[Launcher, ...], seconds: float | None) -> None:
    """Wait until all have ended, or that long."""
    until = None if seconds is None else time.monotonic() + seconds
    while any(launcher.is_running for launcher in launchers) and (until is None or time.monotonic() < until):
        time.sleep(_LOOK_SECONDS)


def _start_launcher(order: LauncherOrder, launching: LauncherStarter, message_path: Path) -> subprocess.Popen[bytes]:
    logs = launching.folder.logs
    options = ["--last-word", str(message_path), "--logs", str(logs)]
    command = [str(launching.python), "-m", "moejob_trainer.launcher", *options]
    with (logs / f"pod-{order.index}.log").open("ab") as log:
        process = subprocess.Popen(
            command,
            env=order.environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            pass_fds=(launching.folder.lock,),
            # Ctrl-C reaches this process only, which signals launchers once: two signals would end them unsaved.
            start_new_session=True,
            preexec_fn=_save_when_parent_dies,  # noqa: PLW1509  # this process has no threads
        )
    if order.cores:
        os.sched_setaffinity(process.pid, order.cores)
    return process


def _save_when_parent_dies() -> None:
    """Make the kernel stop launchers whose `moejob run` was killed: they save and end."""
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGTERM, 0, 0, 0)
