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
from pathlib import Path
from types import FrameType
from typing import assert_never

from moejob_api.contract.names import CHECKPOINT_MARKER
from moejob_api.contract.pods import ExitCode, RunFile, RunPhase, engine_ends_text, parse_engine_ends, parse_phase
from moejob_api.learning_signals import SignalKind, weak_signals
from moejob_api.recovery.restarts import GiveUp, RecoveryAction, ReplaceGang, ReplacePods, RestartBudget, RestartRanks
from moejob_api.recovery.state import RecoveryState
from moejob_cli.running.decisions import DecisionRecord
from moejob_cli.running.display import RunDisplay, RunView
from moejob_cli.running.engines import RunEngines
from moejob_cli.running.launchers import (
    GRACE_SECONDS,
    LauncherPorts,
    LocalRun,
    engine_orders,
    host_address,
    launcher_order,
    most_engines_per_host,
)
from moejob_cli.running.machine import LocalMachine
from moejob_cli.running.ports import AttemptPorts, ReservedPorts
from moejob_cli.running.processes import Launcher, LauncherStarter, end_launchers
from moejob_cli.running.recovery import PodReport, choose_recovery, final_exit_code, state_after_poll
from moejob_cli.running.steps import StepLog

_POLL_SECONDS = 0.25
# Launchers keep to the grace time by themselves; a launcher that exceeds it is frozen.
_FROZEN_SECONDS = 10.0
INTERRUPTED = 130
FAILED = 1


@dataclass(frozen=True, slots=True)
class RunResult:
    """The end of a run: the exit code, and one sentence."""

    exit_code: int
    message: str
    # The run was stopped and saved on request: no error.
    is_as_asked: bool = False


class StopRequests:
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
    def handle_signals(self) -> Iterator[None]:
        """Take the signals of this process."""
        signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = [signal.signal(number, self._take_signal) for number in signals]
        try:
            yield
        finally:
            for number, handler in zip(signals, before, strict=True):
                signal.signal(number, handler)

    def wait(self, seconds: float) -> None:
        """Wait that long, or until one comes."""
        ready, _, _ = select.select([self._reader], [], [], seconds)
        if ready:
            os.read(self._reader, 4096)

    def _take_signal(self, number: int, _frame: FrameType | None) -> None:
        self.signals.append(number)
        # A full pipe wakes the loop as well as one more byte.
        with suppress(BlockingIOError):
            os.write(self._writer, b"\0")


@dataclass(slots=True)
class _PendingStop:
    """A run that is saving: the reason, the requests so far, and the deadline."""

    exit_code: int
    why: str
    until: float
    requests: int = 1


@dataclass(slots=True)
class Supervision:
    """One run under supervision; `run` may be called once."""

    local_run: LocalRun
    machine: LocalMachine
    starter: LauncherStarter
    display: RunDisplay
    log: StepLog
    requests: StopRequests = field(default_factory=StopRequests)
    _launchers: dict[int, Launcher] = field(init=False, default_factory=dict)
    # When to start each launcher that does not run.
    _due_at: dict[int, float] = field(init=False, default_factory=dict)
    _attempt: int = field(init=False, default=0)
    _ports: AttemptPorts | None = field(init=False, default=None)
    # Separate engines outlive attempts, and so do their ports.
    _engine_ports: ReservedPorts = field(init=False)
    _engines: RunEngines = field(init=False)
    _state: RecoveryState = field(init=False)
    _restarts: int = field(init=False, default=0)
    _pending_stop: _PendingStop | None = field(init=False, default=None)
    _began_at: float = field(init=False, default=0.0)
    _saved_step: int | None = field(init=False, default=None)
    _reported_signals: set[SignalKind] = field(init=False, default_factory=set)

    def run(self) -> RunResult:
        """Run the job to its end."""
        self._state = RecoveryState(RestartBudget(self.local_run.spec.lifecycle.backoff_limit))
        self._began_at = time.monotonic()
        hosts = [host_address(index) for index in range(self.local_run.layout.nodes)]
        self._engine_ports = ReservedPorts(hosts, most_engines_per_host(self.local_run))
        orders = engine_orders(self.local_run, self.machine, LauncherPorts(0, 0, rollout=self._engine_ports.first))
        self._engines = RunEngines(self.machine.rollout_python, orders, self.starter.folder.logs)
        with self.requests.handle_signals(), self.display:
            try:
                self._start_gang(after_seconds=0.0)
                result = self._watch_run()
                DecisionRecord(self.starter.folder.path).add(self._attempt, f"the run ends: {result.message}")
                return result
            finally:
                end_launchers(self._launchers.values())
                self._engines.end_engines()
                self._engine_ports.release()
                self._release_ports()

    def _watch_run(self) -> RunResult:
        while True:
            self._start_due()
            for sentence in self._engines.keep_running():
                self.display.report_event(sentence)
            refusal = self._engines.failed_start()
            if refusal is not None:
                return RunResult(ExitCode.BAD_CONFIGURATION if refusal.is_misconfigured else FAILED, refusal.message)
            pods = tuple(launcher.read_report() for _, launcher in sorted(self._launchers.items()))
            self._state = state_after_poll(pods, self.local_run.layout.nodes, self._state)
            self.log.read()
            self._report_weak_signals()
            self.display.show_view(self._run_view(pods))
            result = self._take_requests() or (
                self._stop_result(pods) if self._pending_stop else self._recover_gang(pods)
            )
            if result is not None:
                return result
            self.requests.wait(_POLL_SECONDS)

    def _report_weak_signals(self) -> None:
        """Report each sign that a run learns nothing once; the closing lines repeat a sign that lasts."""
        grpo = self.local_run.spec.grpo
        for weak in weak_signals(self.log.lines, grpo) if grpo else ():
            if weak.kind not in self._reported_signals:
                self._reported_signals.add(weak.kind)
                self.display.report_event(f"note: {weak.message}")

    # --- running ------------------------------------------------------------------------------------------------------

    def _recover_gang(self, pods: tuple[PodReport, ...]) -> RunResult | None:
        if len(pods) == self.local_run.layout.nodes and all(pod.exit_code == ExitCode.DONE for pod in pods):
            return RunResult(0, "done")
        deadline = self.local_run.spec.lifecycle.progress_deadline_seconds
        decision = choose_recovery(pods, self.local_run.layout.nodes, self._state, deadline)
        if decision is None:
            return None
        self._state = decision.state
        self._restarts += 1
        return self._perform_action(decision.action, pods)

    def _perform_action(self, decision: RecoveryAction, pods: tuple[PodReport, ...]) -> RunResult | None:
        match decision:
            case GiveUp(reason=reason):
                return RunResult(final_exit_code(pods), reason)
            case RestartRanks(reason=reason):
                self._report_decision(f"{reason}; why is said in {self.starter.folder.logs}")
            case ReplacePods(pods=lost_pods, after_seconds=seconds, reason=reason):
                names = ", ".join(map(str, lost_pods))
                self._report_decision(f"{reason}; launcher {names} is replaced{_delay_words(seconds)}")
                end_launchers([self._launchers.pop(index) for index in lost_pods if index in self._launchers])
                self._due_at |= dict.fromkeys(lost_pods, time.monotonic() + seconds)
            case ReplaceGang(after_seconds=seconds, reason=reason):
                self._report_decision(
                    f"{reason}; all ranks start again from the newest checkpoint{_delay_words(seconds)}"
                )
                self._start_gang(seconds)
            case _:
                assert_never(decision)
        return None

    def _report_decision(self, sentence: str) -> None:
        self.display.report_event(sentence)
        DecisionRecord(self.starter.folder.path).add(self._attempt, sentence)

    def _start_gang(self, after_seconds: float) -> None:
        end_launchers(self._launchers.values())
        self._launchers.clear()
        # The number is written before a process starts under it, so no attempt's number is ever used twice.
        self._attempt = self.starter.folder.next_attempt()
        self._release_ports()
        self._ports = AttemptPorts(self.local_run.layout.nodes, self._engine_ports.first)
        self._due_at = dict.fromkeys(range(self.local_run.layout.nodes), time.monotonic() + after_seconds)

    def _release_ports(self) -> None:
        if self._ports is not None:
            self._ports.release()

    def _start_due(self) -> None:
        if self._ports is None or self._pending_stop is not None:
            return
        now = time.monotonic()
        for index in [index for index, due_at in self._due_at.items() if due_at <= now]:
            order = launcher_order(self.local_run, self.machine, self._ports.numbers, self._attempt, index)
            self._launchers[index] = self.starter.start(order)
            del self._due_at[index]

    # --- stopping -----------------------------------------------------------------------------------------------------

    def _take_requests(self) -> RunResult | None:
        """Pass a request to stop on to launchers; a second one ends the run without waiting for them."""
        request_count = len(self.requests.signals)
        if request_count and self._pending_stop is None:
            is_keyboard = self.requests.signals[0] == signal.SIGINT
            code = INTERRUPTED if is_keyboard else int(ExitCode.SAVED_AND_STOPPED)
            self._begin_stop(code, "asked to stop", hint="Ctrl-C again ends it unsaved" if is_keyboard else "")
        elif self._pending_stop is not None and request_count > self._pending_stop.requests:
            return RunResult(self._pending_stop.exit_code, "ended before everything was saved")
        limit = self.local_run.spec.lifecycle.active_deadline_seconds
        if self._pending_stop is None and limit is not None and time.monotonic() - self._began_at >= limit:
            self._begin_stop(FAILED, f"active for longer than lifecycle.activeDeadlineSeconds {limit}")
        return None

    def _begin_stop(self, exit_code: int, why: str, hint: str = "") -> None:
        self._pending_stop = _PendingStop(
            exit_code, why, time.monotonic() + GRACE_SECONDS + _FROZEN_SECONDS, max(1, len(self.requests.signals))
        )
        self._report_decision(f"{why}: saving; {hint}" if hint else f"{why}: saving")
        for launcher in self._launchers.values():
            with suppress(ProcessLookupError):
                launcher.send_signal(signal.SIGTERM)

    def _stop_result(self, pods: tuple[PodReport, ...]) -> RunResult | None:
        pending_stop = self._pending_stop
        if pending_stop is None:
            return None
        if any(pod.is_running for pod in pods):
            if time.monotonic() < pending_stop.until:
                return None
            return RunResult(FAILED, f"{pending_stop.why}, but launchers had not ended {GRACE_SECONDS} s later")
        if pods and all(pod.exit_code == ExitCode.DONE for pod in pods):
            return RunResult(0, "done")
        # A launcher that the signal itself kills had not installed its handler, so it had not begun to train.
        stopped_well = (ExitCode.DONE, ExitCode.SAVED_AND_STOPPED, -signal.SIGTERM)
        failed = [pod for pod in pods if pod.exit_code not in stopped_well]
        if failed:
            termination = failed[0].termination_message
            message = termination.message if termination is not None else f"exit code {failed[0].exit_code}"
            return RunResult(FAILED, f"{pending_stop.why}, and pod {failed[0].index} failed while saving: {message}")
        if pending_stop.exit_code == FAILED:
            saved = "saved" if has_checkpoint(self.starter.folder.path) else "nothing is saved"
            return RunResult(FAILED, f"{pending_stop.why}; {saved}")
        return RunResult(pending_stop.exit_code, self._closing_message(), is_as_asked=True)

    def _closing_message(self) -> str:
        if has_checkpoint(self.starter.folder.path):
            return "stopped, and saved; the same command goes on from there"
        if self.log.lines:
            return "stopped, and nothing is saved; the same command starts again with the first step"
        return "stopped before the first step: there is nothing to save; the same command starts again"

    # --- showing ------------------------------------------------------------------------------------------------------

    def _run_view(self, pods: tuple[PodReport, ...]) -> RunView:
        run = next((pod.progress.run for pod in pods if pod.index == 0 and pod.progress is not None), None)
        if run is not None and run.last_checkpoint_step is not None:
            # The recovery state would also know steps whose checkpoints are damaged by now.
            self._saved_step = run.last_checkpoint_step
        doing, percentage, seconds = current_phase(pods, engine_ends_text(self._engines.engine_ends))
        if any(pod.progress is not None and pod.progress.phase == RunPhase.STEPPING for pod in pods):
            self._engines.forget_ends()
        return RunView(
            phase=self._run_phase(pods),
            lines=self.log.lines,
            total_steps=self.local_run.spec.training.max_steps if run is None else run.total_steps,
            checkpoint_step=self._saved_step,
            restarts=self._restarts,
            doing=doing,
            doing_seconds=seconds,
            doing_percentage=percentage,
        )

    def _run_phase(self, pods: tuple[PodReport, ...]) -> str:
        if self._pending_stop is not None:
            return "saving"
        if self._due_at:
            return "waiting"
        if any(pod.exit_code not in (None, ExitCode.DONE) for pod in pods):
            return "ending"
        # Ranks report before they have read model and data, and may fail there: only a step proves training.
        if pods and all(pod.is_ready for pod in pods) and self.log.lines:
            return "training"
        return "restarting" if self._restarts else "starting"


def current_phase(pods: tuple[PodReport, ...], engine_ends: str = "") -> tuple[str | None, int | None, float]:
    """Return phase, percentage and duration of the first pod that makes no steps; None while all make steps.

    Ranks whose engines end in the first step wait for these: colocated ones, as a pod says, or others, as given.
    """
    for pod in pods:
        if pod.is_running and pod.progress is not None and pod.progress.phase is not None:
            phase, percentage = parse_phase(pod.progress.phase) or (RunPhase.STEPPING, None)
            awaits_engines = phase in (RunPhase.AWAITING_ENGINES, RunPhase.FIRST_STEP)
            ends = parse_engine_ends(pod.progress.phase) or (engine_ends if awaits_engines else "")
            if phase is not RunPhase.STEPPING:
                text = f"{RunPhase.AWAITING_ENGINES}: {ends}" if ends else phase.value
                return text, percentage, pod.progress.phase_seconds or 0.0
    return None, None, 0.0


def _delay_words(seconds: float) -> str:
    return f" in {seconds:.0f} s" if seconds else ""


def has_checkpoint(run: Path) -> bool:
    """Return whether a checkpoint of a run is complete."""
    return any((run / RunFile.CHECKPOINTS).glob(f"*/{CHECKPOINT_MARKER}"))
