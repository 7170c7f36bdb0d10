"""Real runs for tests: ranks of moejob_trainer.rank as a launcher starts them, from one fork server with imports done.

The launcher itself has tests of its own; here one start of all ranks is one `Started`: watched, killed or waited for.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import util
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, TypeVar

import torch

from builders import merge_sections, spec
from moejob_api.contract.pods import Environment
from moejob_api.layout.sizes import derive_layout
from moejob_trainer.runtime.fencing import RESTART, Fence, claim_key
from moejob_trainer.runtime.heartbeats import BOARD, HeartbeatBoard
from ports import free_port
from trainer.worlds import PRELOADED

LONGEST_SECONDS = 600.0
Found = TypeVar("Found")

# The model and the data that come with moejob, small enough for many runs; the rate of a step knows no end of the run.
TINY: dict[str, Any] = {
    "model": {"source": "moejob/tiny-moe", "dtype": "float32"},
    "data": {"train": [{"source": "moejob/tiny-chats", "format": "Chat"}], "maxLength": 64},
    "training": {
        "maxSteps": 3,
        "globalBatchSize": 4,
        "optimizer": {"learningRate": 2e-3},
        "scheduler": {"kind": "Constant"},
    },
    "checkpoint": {"everySteps": 1, "exportHuggingFace": False},
    "resources": {"accelerator": "CPU", "cpu": 1, "memory": "6Gi", "sharedMemory": "1Gi"},
}


def await_result(look: Callable[[], Found | None], what: str) -> Found:
    """Return the first result of `look` that is one."""
    until = time.monotonic() + LONGEST_SECONDS
    while time.monotonic() < until:
        if result := look():
            return result
        time.sleep(0.005)
    raise AssertionError(f"{what} did not happen within {LONGEST_SECONDS} s")


@dataclass(frozen=True)
class Step:
    """One step's line in steps.jsonl."""

    step: int
    loss: float
    attempt: int


@dataclass
class StartedRanks:
    """One start of all ranks."""

    folder: Path
    log: Path
    board: HeartbeatBoard
    processes: Sequence[BaseProcess]

    def is_running(self) -> bool:
        return all(process.exitcode is None for process in self.processes)

    def signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            assert process.pid is not None
            # It may end between the look and the signal; then it needs none.
            with suppress(ProcessLookupError):
                if process.exitcode is None:
                    os.kill(process.pid, number)

    def kill(self) -> None:
        """All ranks at once, as a node that loses power; returns when they are gone."""
        self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join()

    def await_exit_codes(self) -> list[int | None]:
        """Exit codes of all ranks. One that failed takes the others down, as the launcher has it."""
        await_result(lambda: not self.is_running(), f"the end of a rank; said so far:\n{self.read_log()}")
        first = [process.exitcode for process in self.processes]
        if any(first):
            self.signal(signal.SIGKILL)
        for process in self.processes:
            process.join(LONGEST_SECONDS)
        return first if any(first) else [process.exitcode for process in self.processes]

    def read_log(self) -> str:
        return self.log.read_text(errors="replace") if self.log.exists() else ""

    def last_line(self) -> str:
        """Return the line that a launcher would quote."""
        return ([line for line in self.read_log().splitlines() if line.strip()] or [""])[-1]


@dataclass
class Runs:
    """Run folders below one folder, as those of jobs that share a volume."""

    volume: Path
    # "spawn" for ranks whose libraries have to read variables of this process, as they do when they are imported.
    method: str = "forkserver"
    _started: list[StartedRanks] = field(default_factory=list)

    def start(
        self,
        job: str = "job",
        *,
        attempt: int = 1,
        uid: str = "",
        before: str = "",
        environ: Mapping[str, str] | None = None,
        **sections: Any,
    ) -> StartedRanks:
        """Starts all ranks of a job whose spec is TINY with these sections laid over it, after a function of LIMITS."""
        job_spec = spec(**merge_sections(TINY, sections))
        ranks = derive_layout(job_spec.parallelism, job_spec.resources.gpus_per_node).gpus
        folder = self.volume / job
        folder.mkdir(parents=True, exist_ok=True)
        secret = (environ or {}).get(Environment.SECRET, "")
        Fence(folder, claim_key(secret, uid or f"uid-{job}")).acquire(attempt, 0)
        outside = self.volume.parent / f"{self.volume.name}-outside"
        outside.mkdir(exist_ok=True)
        number = len(self._started)
        board = HeartbeatBoard(outside / f"board-{number}", ranks)
        for path in board.folder.iterdir():
            # Ranks may run as another user than the test.
            path.chmod(0o666)
        common = {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(ranks),
            RESTART: "0",
            BOARD: str(board.folder),
            Environment.JOB: job,
            Environment.UID: uid or f"uid-{job}",
            Environment.SPEC: job_spec.model_dump_json(by_alias=True, exclude_none=True),
            Environment.ATTEMPT: str(attempt),
            Environment.RANKS_PER_NODE: str(ranks),
            Environment.RUN_FOLDER: str(folder),
            **(environ or {}),
        }
        log = outside / f"log-{number}"
        environments = [{**common, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(ranks)]
        started = StartedRanks(
            folder, log, board, [_start_rank(self.method, environment, log, before) for environment in environments]
        )
        self._started.append(started)
        return started

    def run_to_end(self, job: str = "job", **settings: Any) -> StartedRanks:
        """A run that ends well."""
        started = self.start(job, **settings)
        codes = started.await_exit_codes()
        assert not any(codes), f"{codes}:\n{started.read_log()}"
        return started

    def close(self) -> None:
        for started in self._started:
            started.kill()


def read_steps(folder: Path) -> list[Step]:
    """All whole lines of a step log."""
    log = folder / "steps.jsonl"
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [Step(line["step"], line["loss"], line["attempt"]) for line in records]


def _limit_file_size() -> None:
    """Like a full disk, but for this process alone: the file of the optimizer's state does not fit."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (1_000_000, resource.RLIM_INFINITY))


def _drop_superuser() -> None:
    """Whom a read-only folder stops."""
    if os.geteuid() == 0:
        os.setgid(65534)
        os.setuid(65534)


def _report_algorithms() -> None:
    """Prints at the end of the rank which algorithms torch chose from."""

    def print_algorithms() -> None:
        sys.stdout.write(f"deterministic algorithms: {torch.are_deterministic_algorithms_enabled()}\n")
        sys.stdout.flush()

    util.Finalize(None, print_algorithms, exitpriority=0)


LIMITS: Mapping[str, Callable[[], None]] = {
    "small files": _limit_file_size,
    "no superuser": _drop_superuser,
    "reported algorithms": _report_algorithms,
}


def _start_rank(method: str, environment: Mapping[str, str], log: Path, before: str) -> BaseProcess:
    context = multiprocessing.get_context(method)
    context.set_forkserver_preload(PRELOADED)
    process: BaseProcess = context.Process(target=become_rank, args=(environment, log, before), daemon=True)  # type: ignore[attr-defined]
    process.start()
    return process


def become_rank(environment: Mapping[str, str], log: Path, before: str) -> None:
    """Becomes a rank."""
    log_file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    os.dup2(log_file, 1)
    os.dup2(log_file, 2)
    sys.stdout, sys.stderr = open(1, "w", closefd=False), open(2, "w", closefd=False)  # noqa: SIM115
    os.environ.update(environment)
    from moejob_trainer import rank  # noqa: PLC0415 not for who starts it

    if before:
        LIMITS[before]()
    sys.exit(rank.main())
