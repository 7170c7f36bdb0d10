"""A job of `moejob run` that a benchmark starts, watches and copies the logs of."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from time import monotonic, sleep
from typing import Any

from benchmarks.grpo_learning.runs import moejob_command, run_environment

# Logs are copied while the job runs: what the machine did is known although it was taken away in the middle.
_POLL_SECONDS = 2.0
_ENDING_SECONDS = 30
_LONGEST_LOG_BYTES = 2_000_000


@dataclass(frozen=True, slots=True)
class JobRun:
    """A finished run: its exit code, 124 where it took too long, and the lines of its step log."""

    code: int
    steps: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class RunLimits:
    """`steps`: kill the run once it has logged this many, for the last checkpoint of a large model fits no disk."""

    seconds: float
    steps: int | None = None


def run_job(job: Mapping[str, Any], name: str, folders: tuple[Path, Path], gpus: str, limits: RunLimits) -> JobRun:
    """Run a job on these GPUs, as CUDA_VISIBLE_DEVICES names them; `folders` are the run's and the one for logs."""
    run, out = folders
    (out / name).mkdir(parents=True, exist_ok=True)
    # JSON is YAML.
    file = out / f"{name}.json"
    file.write_text(json.dumps(job, indent=1))
    command = [*moejob_command(), "run", str(file), "--run-dir", str(run)]
    environment = run_environment(os.environ, gpus)
    with (out / f"{name}.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
        code = _watch_process(process, run, out / name, limits)
    return JobRun(code, read_steps(run))


def read_steps(run: Path) -> list[dict[str, Any]]:
    """Return the lines of a run's step log."""
    log = run / "steps.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def log_tails(name: str, out: Path) -> str:
    """Return the ends of the logs of a run, for one that failed."""
    files = (out / f"{name}.log", *sorted((out / name).glob("*.log")))
    return "\n".join(f"-- {file.name}\n{file.read_text(errors='replace')[-4000:]}" for file in files)


def _watch_process(process: subprocess.Popen[bytes], run: Path, out: Path, limits: RunLimits) -> int:
    until = monotonic() + limits.seconds
    while process.poll() is None and monotonic() < until:
        sleep(_POLL_SECONDS)
        _copy_logs(run, out)
        if limits.steps is not None and len(read_steps(run)) >= limits.steps:
            _kill_tree(process)
            return 0
    code = process.poll()
    if code is None:
        _end_process(process)
    _copy_logs(run, out)
    return 124 if code is None else code


def _end_process(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_ENDING_SECONDS)
    except subprocess.TimeoutExpired:
        _kill_tree(process)


def _kill_tree(process: subprocess.Popen[bytes]) -> None:
    # A launcher that outlives its parent would save before it ends. A stopped process starts nothing more.
    process.send_signal(signal.SIGSTOP)
    for pid in (*_descendants(process.pid), process.pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def _descendants(pid: int) -> list[int]:
    """Return the processes below one, each behind its parent."""
    children: dict[int, list[int]] = {}
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            parent = int(file.read_text().rpartition(") ")[2].split()[1])
            children.setdefault(parent, []).append(int(file.parent.name))
    below = list(children.get(pid, ()))
    for child in below:
        below += children.get(child, ())
    return below


def _copy_logs(run: Path, out: Path) -> None:
    for file in (*run.glob("*.jsonl"), *run.glob("logs/*.log"), *run.glob("*.log")):
        (out / file.name).write_bytes(file.read_bytes()[-_LONGEST_LOG_BYTES:])
