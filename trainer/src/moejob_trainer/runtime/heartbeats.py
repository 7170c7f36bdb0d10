"""Heartbeats: what a rank reports to the launcher of its pod, and the board where the launcher reads it.

A rank calls `Heartbeat.for_rank()` once, then `beat(step)` as often as it likes (a microsecond, without a lock). Rank 0
also reports the progress of the run. The launcher makes one `HeartbeatBoard` for each start of its ranks, so that what
an earlier start still writes lands on a board that is not read. Knows nothing of torch, of HTTP or of other pods.

A rank that hangs is found by launcher/agent.py, after the job's progressDeadlineSeconds without a beat; where the
launcher does not act, by the operator (moejob_operator.planning.failures).
"""

from __future__ import annotations

import mmap
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Self

from pydantic import ValidationError

from moejob_api.contract.pods import RunPhase, RunProgress
from moejob_trainer.runtime.activity import has_worked, read_activity

# Folder of a pod's heartbeat board; the launcher sets it for its ranks.
BOARD = "MOEJOB_BEATS"

_BEATS_FILE, _RUN_FILE = "beats", "run.json"
# Beats sent, monotonic nanoseconds of the last one, steps done; the phase of the rank, as its place in RunPhase counted
# from 1, when it began, and how much of its work is done, of how much. 64-bit words, so that none is ever half written.
_COUNT, _AT, _STEP, _PHASE, _PHASE_AT, _DONE, _TOTAL, _WORDS = 0, 1, 2, 3, 4, 5, 6, 7
_WORD_BYTES = 8
_HEARTBEAT_SECONDS = 5.0
_PHASES = tuple(RunPhase)
# Calls into torch that wait for other ranks.
_COLLECTIVES = f"torch{os.sep}distributed{os.sep}"


# Takes how much of a phase's work is done, of how much.
ShareReport = Callable[[int, int], None]


def ignore_share(_done: int, _total: int) -> None:
    """Report nothing."""


@dataclass(slots=True)
class ShareCounter:
    """Adds up the work of a phase, and reports each sum."""

    total: int
    report: ShareReport = ignore_share
    done: int = field(init=False, default=0)

    def add(self, amount: int) -> None:
        """Count work that is done."""
        self.done += amount
        self.report(self.done, self.total)


class NoLauncher(RuntimeError):
    """A rank that no launcher has started asks where to send its heartbeats."""


class Heartbeat:
    """One rank's side of a board."""

    def __init__(self, words: memoryview, run_file: Path) -> None:
        self._words, self._run_file = words, run_file

    @classmethod
    def for_rank(cls, environ: Mapping[str, str] = os.environ) -> Heartbeat:
        """The heartbeat of this process, which the launcher has started as a rank."""
        folder, local_rank = environ.get(BOARD), environ.get("LOCAL_RANK")
        if folder is None or local_rank is None:
            raise NoLauncher(f"{BOARD} and LOCAL_RANK are not set; start ranks through moejob_trainer.launcher")
        first = int(local_rank) * _WORDS
        words = _map_words(Path(folder) / _BEATS_FILE)[first : first + _WORDS]
        return cls(words, Path(folder) / _RUN_FILE)

    def beat(self, step: int) -> None:
        """Say that this rank is alive and has done that many steps."""
        self._words[_STEP] = step
        self._words[_AT] = time.monotonic_ns()
        self._words[_COUNT] += 1

    def enter_phase(self, phase: RunPhase) -> None:
        """Set the phase of this rank; setting it again changes nothing."""
        number = _PHASES.index(phase) + 1
        if self._words[_PHASE] != number:
            self._words[_DONE] = self._words[_TOTAL] = 0
            self._words[_PHASE_AT] = time.monotonic_ns()
            self._words[_PHASE] = number

    def report_share(self, done: int, total: int) -> None:
        """Say how much of the phase's work is done. It is no sign of life, for another thread may report it."""
        self._words[_TOTAL], self._words[_DONE] = total, done

    def report_run(self, run: RunProgress) -> None:
        """Report the progress of the run; for rank 0."""
        unfinished = self._run_file.with_suffix(".new")
        # On a full disk the shown progress gets stale; the run continues.
        with suppress(OSError):
            unfinished.write_text(run.model_dump_json(by_alias=True, exclude_none=True), encoding="utf-8")
            unfinished.replace(self._run_file)


class BackgroundHeartbeat:
    """Beats in the background while a rank waits for engines and rewards, which have limits of their own."""

    def __init__(self, heartbeat: Heartbeat, step: int = 0, is_alive: Callable[[], bool] = lambda: True) -> None:
        self._heartbeat, self._step, self._is_alive = heartbeat, step, is_alive
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._beat_until_stopped, name="pulse", daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop: from now on the rank beats for itself. A second call changes nothing."""
        self._is_over.set()
        self._thread.join()

    def _beat_until_stopped(self) -> None:
        self._heartbeat.beat(self._step)
        while not self._is_over.wait(_HEARTBEAT_SECONDS):
            if self._is_alive():
                self._heartbeat.beat(self._step)


def working_heartbeat(heartbeat: Heartbeat, step: int = 0) -> BackgroundHeartbeat:
    """Beat during work without a known duration: download, tokenize, read weights, check, export.

    A rank that neither computes nor moves bytes falls silent, and is restarted like a rank that hangs in a step. A rank
    that waits for its peers keeps beating: the awaited peer works, or falls silent itself.
    """
    return BackgroundHeartbeat(heartbeat, step, RankWork(threading.get_ident()))


class RankWork:
    """Tells whether this process has worked, or its main thread waits in a collective, since it was called last."""

    def __init__(self, main_thread: int) -> None:
        self._main_thread = main_thread
        self._last_activity, self._last_read_at = read_activity(os.getpid()), time.monotonic()

    def __call__(self) -> bool:
        """Return whether this rank is alive."""
        before, seconds = self._last_activity, time.monotonic() - self._last_read_at
        self._last_activity, self._last_read_at = read_activity(os.getpid()), time.monotonic()
        return has_worked(before, self._last_activity, seconds) or self._is_in_collective()

    def _is_in_collective(self) -> bool:
        frame = sys._current_frames().get(self._main_thread)  # noqa: SLF001 the only way to another thread's stack
        while frame is not None:
            if _COLLECTIVES in frame.f_code.co_filename:
                return True
            frame = frame.f_back
        return False


@dataclass(frozen=True, slots=True)
class RankHeartbeat:
    """The last heartbeat of one rank; before the first one, its age counts from the start."""

    has_beaten: bool
    step: int
    age_seconds: float
    # None before the rank has said it.
    phase: RunPhase | None = None
    phase_seconds: float = 0.0
    # Of the phase's work that is done; None where its end is unknown.
    phase_share: float | None = None


class HeartbeatBoard:
    """The launcher's side: one row for each rank of the pod in a folder of its own, and rank 0's progress."""

    def __init__(self, folder: Path, ranks: int, run: RunProgress | None = None) -> None:
        self.folder, self._ranks = folder, ranks
        folder.mkdir(parents=True)
        path = folder / _BEATS_FILE
        path.write_bytes(bytes(ranks * _WORDS * _WORD_BYTES))
        self._words = _map_words(path)
        for local_rank in range(ranks):
            self._words[local_rank * _WORDS + _AT] = time.monotonic_ns()
        if run is not None:
            Heartbeat(self._words, folder / _RUN_FILE).report_run(run)

    def read(self) -> tuple[RankHeartbeat, ...]:
        """Every rank, in order."""
        now = time.monotonic_ns()
        return tuple(self._read_row(first, now) for first in range(0, self._ranks * _WORDS, _WORDS))

    def read_run(self) -> RunProgress | None:
        """Return the progress that rank 0 reported last."""
        try:
            return RunProgress.model_validate_json((self.folder / _RUN_FILE).read_bytes())
        except (OSError, ValidationError):
            return None

    def _read_row(self, first: int, now: int) -> RankHeartbeat:
        words = self._words
        age = max(0, now - words[first + _AT]) / 1e9
        step, number = max(0, words[first + _STEP]), words[first + _PHASE]
        if not 0 < number <= len(_PHASES):
            return RankHeartbeat(words[first + _COUNT] > 0, step, age)
        seconds = max(0, now - words[first + _PHASE_AT]) / 1e9
        done, total = words[first + _DONE], words[first + _TOTAL]
        share = min(1.0, max(0, done) / total) if total > 0 else None
        return RankHeartbeat(words[first + _COUNT] > 0, step, age, _PHASES[number - 1], seconds, share)


def _map_words(path: Path) -> memoryview:
    with path.open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 0)).cast("q")
