"""Colocated engines: children of the launcher, so that they outlive the ranks of a round.

An engine takes a minute to start and depends on no rank: ranks restart beside it. An engine that ends is started again,
after a longer pause each time; ranks then ask another one, or wait. For an engine that cannot start they would wait in
vain.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from moejob_api.contract.engines import colocated_per_pod
from moejob_api.contract.pods import Environment, PodRole
from moejob_api.contract.torchrun import TORCHRUN_VARIABLES
from moejob_api.job.resources import Accelerator
from moejob_api.recovery.engine_starts import LOG_BYTES, EngineStarts
from moejob_trainer.launcher.log import LauncherLog
from moejob_trainer.launcher.pod import TrainerPod

log = LauncherLog()

_FIRST_DELAY_SECONDS, _LONGEST_DELAY_SECONDS = 1.0, 60.0
_END_SECONDS = 20.0


@dataclass(frozen=True, slots=True)
class EngineCommand:
    """One engine to start."""

    index: int
    python: Path
    environment: Mapping[str, str]


def engine_commands(pod: TrainerPod, environ: Mapping[str, str]) -> tuple[EngineCommand, ...]:
    """Return the engines of a pod; none where they have pods of their own. Pure."""
    count = colocated_per_pod(pod.spec, pod.ranks_per_node)
    first = pod.index * count
    # The modules of one environment are not those of another, and an engine is no rank.
    inherited = {
        name: value
        for name, value in environ.items()
        if name not in {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", *TORCHRUN_VARIABLES}
    }
    return tuple(
        EngineCommand(
            first + number,
            pod.rollout_python,
            inherited
            | {Environment.ROLE.value: PodRole.ROLLOUT.value, Environment.INDEX.value: str(first + number)}
            | _gpu_variables(pod, number, environ),
        )
        for number in range(count)
    )


def _gpu_variables(pod: TrainerPod, number: int, environ: Mapping[str, str]) -> dict[str, str]:
    """The GPUs of one engine: as many as it spans, beside the ranks that use them too."""
    if pod.spec.grpo is None or pod.spec.resources.accelerator is not Accelerator.GPU:
        return {}
    tensor = pod.spec.grpo.rollout.tensor
    visible_devices = environ.get("CUDA_VISIBLE_DEVICES")
    names = visible_devices.split(",") if visible_devices else [str(gpu) for gpu in range(pod.ranks_per_node)]
    return {"CUDA_VISIBLE_DEVICES": ",".join(names[number * tensor : (number + 1) * tensor])}


@dataclass(frozen=True, slots=True)
class EngineRefusal:
    """An engine that cannot start."""

    is_misconfigured: bool
    message: str


class PodEngines:
    """The engines of one pod. The launcher's main thread alone starts, looks at and ends them."""

    def __init__(self, commands: Sequence[EngineCommand], logs: Path | None) -> None:
        self._engines = tuple(_EngineProcess(command, logs) for command in commands)

    @property
    def pids(self) -> frozenset[int]:
        """The running engines; their own children end with them."""
        return frozenset(engine.pid for engine in self._engines if engine.pid is not None)

    @property
    def engine_ends(self) -> Mapping[int, int]:
        """The ends of each engine since ranks made their last step. May be read from any thread."""
        return {engine.index: engine.ends for engine in self._engines}

    def forget_ends(self) -> None:
        """Forget the ends of engines: ranks make steps."""
        for engine in self._engines:
            engine.ends = 0

    def keep_running(self) -> None:
        """Start engines that do not run and are due."""
        for engine in self._engines:
            engine.keep_running(time.monotonic())

    def find_refusal(self) -> EngineRefusal | None:
        """Return the reason that an engine cannot start, once it is known, and reset the count of its starts."""
        return next(filter(None, (engine.find_refusal() for engine in self._engines)), None)

    def stop(self) -> None:
        """End all engines: asked first, then by force."""
        for engine in self._engines:
            engine.send_signal(signal.SIGTERM)
        until = time.monotonic() + _END_SECONDS
        for engine in self._engines:
            engine.wait_for_end(until)


class _EngineProcess:
    def __init__(self, command: EngineCommand, logs: Path | None) -> None:
        self._command, self._logs = command, logs
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at, self._due_at, self._delay = 0.0, 0.0, _FIRST_DELAY_SECONDS
        self._starts = EngineStarts()
        self.ends = 0

    @property
    def index(self) -> int:
        return self._command.index

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def keep_running(self, now: float) -> None:
        if self._process is not None and self._process.poll() is not None:
            self._note_end(self._process.returncode, now)
        if self._process is None and now >= self._due_at:
            self._start(now)

    def find_refusal(self) -> EngineRefusal | None:
        starts = self._starts
        if not starts.is_hopeless:
            return None
        self._starts = EngineStarts()
        log_end = b"" if self._log_path is None else self._log_path.read_bytes()[-LOG_BYTES:]
        return EngineRefusal(starts.is_misconfigured, starts.refusal_message(self._command.index, log_end))

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the engine itself, or all of its group where it cannot answer for them."""
        if self._process is not None:
            with suppress(ProcessLookupError):
                (os.killpg if number is signal.SIGKILL else os.kill)(self._process.pid, number)

    def wait_for_end(self, until: float) -> None:
        if self._process is None:
            return
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(max(0.0, until - time.monotonic()))
        # Its workers hold the GPU's memory, and may outlive it.
        self.send_signal(signal.SIGKILL)
        self._process.wait()

    def _note_end(self, code: int, now: float) -> None:
        self.send_signal(signal.SIGKILL)
        self._process = None
        self.ends += 1
        self._starts = self._starts.after_end(code, now - self._started_at)
        self._delay = min(2 * self._delay, _LONGEST_DELAY_SECONDS) if self._starts.failed else _FIRST_DELAY_SECONDS
        self._due_at = now + self._delay
        log.warning("an engine has ended", engine=self._command.index, exit_code=code, again_in_seconds=self._delay)

    @property
    def _log_path(self) -> Path | None:
        return None if self._logs is None else self._logs / f"engine-{self._command.index}.log"

    def _start(self, now: float) -> None:
        output = None if self._log_path is None else self._log_path.open("ab")
        try:
            self._process = subprocess.Popen(
                [self._command.python, "-m", "moejob_rollout"],
                env=self._command.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        finally:
            if output is not None:
                output.close()
        self._started_at = now
        log.info("engine started", engine=self._command.index, pid=self._process.pid)
