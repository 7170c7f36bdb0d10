"""Runs of `moejob run` by whatever Pythons the environment names, and the files that they leave.

MOEJOB_TRAINER_PYTHON and MOEJOB_ROLLOUT_PYTHON name the environments of trainer and engines; the command itself is the
checkout's, else a module of this Python.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
_INSTALLED = ROOT / ".venv/operator/bin/moejob"
# A run that is asked to stop saves first, and ends its engines.
_ENDING_SECONDS = 120.0


def run_job(file: Path, folder: Path, most_seconds: float, gpus: str | None = None) -> tuple[int, str]:
    """Run a job in a folder, and stop it when it takes too long; its exit code, and what it printed."""
    command = [*moejob_command(), "run", str(file), "--run-dir", str(folder)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=run_environment(os.environ, gpus)
    )
    try:
        printed, _ = process.communicate(timeout=most_seconds)
    except subprocess.TimeoutExpired:
        printed = _stop(process)
    return process.returncode, printed


def run_environment(environ: Mapping[str, str], gpus: str | None) -> dict[str, str]:
    """Return the variables of a run: this Python trains unless another is named or installed; pure but for the look."""
    trainer = {} if (ROOT / ".venv/trainer").is_dir() else {"MOEJOB_TRAINER_PYTHON": sys.executable}
    visible = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
    return {"HF_HUB_OFFLINE": "1", **trainer, **environ, **visible}


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """Return the last line of each step in a run's log."""
    log = folder / "steps.jsonl"
    text = log.read_text(encoding="utf-8") if log.exists() else ""
    lines = [json.loads(line) for line in text.splitlines(keepends=True) if line.endswith("\n")]
    return [*{line["step"]: line for line in lines}.values()]


def engine_logs(folder: Path) -> str:
    """Return what the engines of a run wrote."""
    return "\n".join(file.read_text(errors="replace") for file in sorted((folder / "logs").glob("engine-*.log")))


def last_words(folder: Path, printed: str) -> str:
    """Return the ends of everything that a run wrote, which say why it failed."""
    logs = sorted((folder / "logs").glob("*.log"))
    return "\n".join([printed[-6000:], *(f"-- {log.name}\n{log.read_text(errors='replace')[-4000:]}" for log in logs)])


def moejob_command() -> Sequence[str]:
    """Return the command line of moejob in this checkout, else the module of this Python."""
    return [str(_INSTALLED)] if _INSTALLED.exists() else [sys.executable, "-m", "moejob_cli"]


def _stop(process: subprocess.Popen[str]) -> str:
    process.send_signal(signal.SIGTERM)
    try:
        return process.communicate(timeout=_ENDING_SECONDS)[0]
    except subprocess.TimeoutExpired:
        process.kill()
        return process.communicate()[0]
