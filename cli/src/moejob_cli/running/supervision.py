"""A run from its first launcher to its last: polls, performs recovery.py's decisions, and saves on a request to stop.

Owns the launchers of the present attempt. Hands a view of the run to display.py, which alone knows how to show it.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from types import FrameType
from typing import assert_never

from moejob_api.contract.pods import ExitCode, RunPhase
from moejob_api.learning_signals import SignalKind, weak_signals
from moejob_api.recovery.restarts import Budget, GiveUp, RecoveryAction, ReplaceGang, ReplacePods, RestartRanks
from moejob_api.recovery.state import RecoveryState
from moejob_cli.running.display import RunDisplay, View
from moejob_cli.running.engines import RunEngines
from moejob_cli.running.launchers import (
    GRACE_SECONDS,
    Ports,
    RunOf,
    engine_orders,
    host,
    launcher_order,
    most_engines_per_host,
)
from moejob_cli.running.machine import LocalMachine
from moejob_cli.running.ports import AttemptPorts, ReservedPorts
from moejob_cli.running.processes import Launcher, Launching, end
from moejob_cli.running.recovery import PodReport, exit_code_of, polled, recovery
from moejob_cli.running.steps import StepLog

_POLL_SECONDS = 0.25
# Launchers keep to the grace time by themselves; one that does not is frozen.
_FROZEN_SECONDS = 10.0
INTERRUPTED = 130
FAILED = 1


@dataclass(frozen=True, slots=True)
class Result:
    """The end of a run: the exit code, and one sentence."""

    exit_code: int
    message: str
    # The run was stopped and saved on request: no error.
    is_as_asked: bool = False


class Requests:
    """Requests to stop, as signals bring them.

    Handlers run between any two instructions of the main thread, also while it holds the lock of an Event that it waits
    for, so the handler takes no lock: it appends to a list and writes to a pipe.
    """

    def __init__(self) -> None:
        self.signals: list[int] = []
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take the signals of this process."""
        taken = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(number, self._take) for number in taken]
        try:
            yield
        finally:
            for number, handler in zip(taken, before, strict=True):
                signal.signal(number, handler)

    def wait(self, seconds: float) -> None:
        """Wait that long, or until one comes."""
        ready, _, _ = select.select([self._reader], [], [], seconds)
        if ready:
            os.read(self._reader, 4096)

    def _take(self, number: int, _frame: FrameType | None) -> None:
        self.signals.append(number)
        # A full pipe wakes the loop as well as one more byte.
        with suppress(BlockingIOError):
            os.write(self._writer, b"\0")


@dataclass(slots=True)
class _Stopping:
    """A run that is saving: the reason, the requests so far, and the deadline."""

    exit_code: int
    why: str
    until: float
    requests: int = 1


@dataclass(slots=True)
class Supervision:
    """One run under supervision; `run` may be called once."""

    of: RunOf
    machine: LocalMachine
    launching: Launching
    display: RunDisplay
    log: StepLog
    requests: Requests = field(default_factory=Requests)
    _launchers: dict[int, Launcher] = field(init=False, default_factory=dict)
    # When to start each launcher that does not run.
    _due: dict[int, float] = field(init=False, default_factory=dict)
    _attempt: int = field(init=False, default=0)
    _ports: AttemptPorts | None = field(init=False, default=None)
    # Separate engines outlive attempts, and so do their ports.
    _engine_ports: ReservedPorts = field(init=False)
    _engines: RunEngines = field(init=False)
    _state: RecoveryState = field(init=False)
    _restarts: int = field(init=False, default=0)
    _stopping: _Stopping | None = field(init=False, default=None)
    _begun: float = field(init=False, default=0.0)
    _saved_step: int | None = field(init=False, default=None)
    _reported_signals: set[SignalKind] = field(init=False, default_factory=set)

    def run(self) -> Result:
        """Run the job to its end."""
        self._state = RecoveryState(Budget(self.of.spec.lifecycle.backoff_limit))
        self._begun = time.monotonic()
        hosts = [host(index) for index in range(self.of.layout.nodes)]
        self._engine_ports = ReservedPorts(hosts, most_engines_per_host(self.of))
        orders = engine_orders(self.of, self.machine, Ports(0, 0, self._engine_ports.first))
        self._engines = RunEngines(self.machine.rollout_python, orders, self.launching.folder.logs)
        with self.requests.listening(), self.display:
            try:
                self._new_gang(after_seconds=0.0)
                return self._watched()
            finally:
                end(self._launchers.values())
                self._engines.end()
                self._engine_ports.release()
                self._release_ports()

    def _watched(self) -> Result:
        while True:
            self._start_due()
            for sentence in self._engines.keep_running():
                self.display.report(sentence)
            refusal = self._engines.refusal()
            if refusal is not None:
                return Result(ExitCode.BAD_CONFIGURATION if refusal.is_misconfigured else FAILED, refusal.message)
            pods = tuple(launcher.report() for _, launcher in sorted(self._launchers.items()))
            self._state = polled(pods, self.of.layout.nodes, self._state)
            self.log.read()
            self._report_weak_signals()
            self.display.show(self._view(pods))
            result = self._take_requests() or (self._stopped(pods) if self._stopping else self._recovered(pods))
            if result is not None:
                return result
            self.requests.wait(_POLL_SECONDS)

    def _report_weak_signals(self) -> None:
        """Report each sign that a run learns nothing once; the closing lines repeat a sign that lasts."""
        grpo = self.of.spec.grpo
        for weak in weak_signals(self.log.lines, grpo) if grpo else ():
            if weak.kind not in self._reported_signals:
                self._reported_signals.add(weak.kind)
                self.display.report(f"note: {weak.message}")

    # --- running ------------------------------------------------------------------------------------------------------

    def _recovered(self, pods: tuple[PodReport, ...]) -> Result | None:
        if len(pods) == self.of.layout.nodes and all(pod.exit_code == ExitCode.DONE for pod in pods):
            return Result(0, "done")
        deadline = self.of.spec.lifecycle.progress_deadline_seconds
        found = recovery(pods, self.of.layout.nodes, self._state, deadline)
        if found is None:
            return None
        self._state = found.state
        self._restarts += 1
        return self._performed(found.action, pods)

    def _performed(self, decision: RecoveryAction, pods: tuple[PodReport, ...]) -> Result | None:
        match decision:
            case GiveUp(reason=reason):
                return Result(exit_code_of(pods), reason)
            case RestartRanks(reason=reason):
                self.display.report(f"{reason}; why is said in {self.launching.folder.logs}")
            case ReplacePods(pods=lost, after_seconds=seconds, reason=reason):
                names = ", ".join(map(str, lost))
                self.display.report(f"{reason}; launcher {names} is replaced{_after(seconds)}")
                end([self._launchers.pop(index) for index in lost if index in self._launchers])
                self._due |= dict.fromkeys(lost, time.monotonic() + seconds)
            case ReplaceGang(after_seconds=seconds, reason=reason):
                self.display.report(f"{reason}; all ranks start again from the newest checkpoint{_after(seconds)}")
                self._new_gang(seconds)
            case _:
                assert_never(decision)
        return None

    def _new_gang(self, after_seconds: float) -> None:
        end(self._launchers.values())
        self._launchers.clear()
        # The number is written before a process starts under it, so no attempt's number is ever used twice.
        self._attempt = self.launching.folder.next_attempt()
        self._release_ports()
        self._ports = AttemptPorts(self.of.layout.nodes, self._engine_ports.first)
        self._due = dict.fromkeys(range(self.of.layout.nodes), time.monotonic() + after_seconds)

    def _release_ports(self) -> None:
        if self._ports is not None:
            self._ports.release()

    def _start_due(self) -> None:
        if self._ports is None or self._stopping is not None:
            return
        now = time.monotonic()
        for index in [index for index, at in self._due.items() if at <= now]:
            order = launcher_order(self.of, self.machine, self._ports.numbers, self._attempt, index)
            self._launchers[index] = self.launching.start(order)
            del self._due[index]

    # --- stopping -----------------------------------------------------------------------------------------------------

    def _take_requests(self) -> Result | None:
        """Pass a request to stop on to launchers; a second one ends the run without waiting for them."""
        asked = len(self.requests.signals)
        if asked and self._stopping is None:
            is_keyboard = self.requests.signals[0] == signal.SIGINT
            code = INTERRUPTED if is_keyboard else int(ExitCode.SAVED_AND_STOPPED)
            self._stop(code, "asked to stop", again="Ctrl-C again ends it unsaved" if is_keyboard else "")
        elif self._stopping is not None and asked > self._stopping.requests:
            return Result(self._stopping.exit_code, "ended before everything was saved")
        limit = self.of.spec.lifecycle.active_deadline_seconds
        if self._stopping is None and limit is not None and time.monotonic() - self._begun >= limit:
            self._stop(FAILED, f"active for longer than lifecycle.activeDeadlineSeconds {limit}")
        return None

    def _stop(self, exit_code: int, why: str, again: str = "") -> None:
        self._stopping = _Stopping(
            exit_code, why, time.monotonic() + GRACE_SECONDS + _FROZEN_SECONDS, max(1, len(self.requests.signals))
        )
        self.display.report(f"{why}: saving; {again}" if again else f"{why}: saving")
        for launcher in self._launchers.values():
            with suppress(ProcessLookupError):
                launcher.signal(signal.SIGTERM)

    def _stopped(self, pods: tuple[PodReport, ...]) -> Result | None:
        stopping = self._stopping
        if stopping is None:
            return None
        if any(pod.is_running for pod in pods):
            if time.monotonic() < stopping.until:
                return None
            return Result(FAILED, f"{stopping.why}, but launchers had not ended {GRACE_SECONDS} s later")
        if pods and all(pod.exit_code == ExitCode.DONE for pod in pods):
            return Result(0, "done")
        # A launcher that the signal itself kills had not installed its handler, so it had not begun to train.
        stopped_well = (ExitCode.DONE, ExitCode.SAVED_AND_STOPPED, -signal.SIGTERM)
        failed = [pod for pod in pods if pod.exit_code not in stopped_well]
        if failed:
            word = failed[0].word
            message = word.message if word is not None else f"exit code {failed[0].exit_code}"
            return Result(FAILED, f"{stopping.why}, and pod {failed[0].index} failed while saving: {message}")
        if stopping.exit_code == FAILED:
            return Result(FAILED, f"{stopping.why}; saved")
        done = (
            "stopped, and saved; the same command goes on from there"
            if self.log.lines
            else "stopped before the first step: there is nothing to save; the same command starts again"
        )
        return Result(stopping.exit_code, done, is_as_asked=True)

    # --- showing ------------------------------------------------------------------------------------------------------

    def _view(self, pods: tuple[PodReport, ...]) -> View:
        run = next((pod.progress.run for pod in pods if pod.index == 0 and pod.progress is not None), None)
        if run is not None and run.last_checkpoint_step is not None:
            # The recovery state would also know steps whose checkpoints are damaged by now.
            self._saved_step = run.last_checkpoint_step
        doing, seconds = _doing(pods)
        return View(
            phase=self._phase(pods),
            lines=self.log.lines,
            total_steps=self.of.spec.training.max_steps if run is None else run.total_steps,
            checkpoint_step=self._saved_step,
            restarts=self._restarts,
            doing=doing,
            doing_seconds=seconds,
        )

    def _phase(self, pods: tuple[PodReport, ...]) -> str:
        if self._stopping is not None:
            return "saving"
        if self._due:
            return "waiting"
        if any(pod.exit_code not in (None, ExitCode.DONE) for pod in pods):
            return "ending"
        # Ranks report before they have read model and data, and may fail there: only a step proves training.
        if pods and all(pod.is_ready for pod in pods) and self.log.lines:
            return "training"
        return "restarting" if self._restarts else "starting"


def _doing(pods: tuple[PodReport, ...]) -> tuple[str | None, float]:
    """Return the phase of the first pod that makes no steps, and its duration; None while all make steps."""
    for pod in pods:
        if pod.is_running and pod.progress is not None and pod.progress.phase not in (None, RunPhase.STEPPING):
            return pod.progress.phase, pod.progress.phase_seconds or 0.0
    return None, 0.0


def _after(seconds: float) -> str:
    return f" in {seconds:.0f} s" if seconds else ""
