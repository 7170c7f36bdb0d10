"""`moejob run` in tests: a process of its own, with a launcher that stands in for the trainer's."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from builders import merge_sections

STAND_IN = Path(__file__).parent / "stand_in"
LONGEST_SECONDS = 300.0
Found = TypeVar("Found")

JOB: dict[str, Any] = {
    "apiVersion": "moejob.dev/v1alpha1",
    "kind": "MoETrainingJob",
    "metadata": {"name": "small"},
    "spec": {
        "method": "SFT",
        "model": {"source": "moejob/tiny-moe", "dtype": "float32"},
        "data": {"train": [{"source": "moejob/tiny-chats", "format": "Chat"}], "maxLength": 64},
        "training": {"maxSteps": 4, "globalBatchSize": 8},
        "storage": {"size": "2Gi"},
        "resources": {"accelerator": "CPU", "gpusPerNode": 1},
    },
}
TWO_NODES = {"parallelism": {"data": 2}}

# What a launcher may do in one life; see stand_in.
Act = list[Any]
STEPS: Act = ["steps", 4]
DONE: Act = ["ends", 0]


@dataclass
class Ended:
    """The end of the command: its exit code, stdout and stderr."""

    code: int
    stdout: str
    stderr: str


@dataclass
class Run:
    """One `moejob run` in a folder; `lives` says what the launchers of each pod do."""

    folder: Path
    sections: dict[str, Any] = field(default_factory=dict)
    settings: tuple[str, ...] = ()
    process: subprocess.Popen[str] | None = None

    @property
    def place(self) -> Path:
        return self.folder / "run"

    def start(self, *pods: list[list[Act]], **environment: str) -> None:
        job = merge_sections(JOB, {"spec": self.sections})
        file = self.folder / "job.yaml"
        file.write_text(json.dumps(job))
        variables = {
            "MOEJOB_TRAINER_PYTHON": sys.executable,
            "PYTHONPATH": str(STAND_IN),
            "STAND_IN": json.dumps(dict(enumerate(pods))),
        }
        options = [word for setting in self.settings for word in ("--set", setting)]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "moejob_cli", "run", str(file), "--run-dir", str(self.place), *options],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | variables | environment,
        )

    def ended(self) -> Ended:
        assert self.process is not None
        stdout, stderr = self.process.communicate(timeout=LONGEST_SECONDS)
        return Ended(self.process.returncode, stdout, stderr)

    def run(self, *pods: list[list[Act]], **environment: str) -> Ended:
        self.start(*pods, **environment)
        return self.ended()

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def life(self, index: int, number: int) -> dict[str, str]:
        """Return what the environment of a launcher was, once it is there."""
        return eventually(lambda: _note(self.place / "lives" / f"{index}-{number}.json"), f"life {number} of {index}")

    def lives(self, index: int) -> int:
        return len(list((self.place / "lives").glob(f"{index}-*.json")))

    def log(self) -> str:
        return (self.place / "steps.jsonl").read_text()

    def close(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.kill()
            self.process.communicate()


def eventually(poll: Callable[[], Found | None], what: str) -> Found:
    until = time.monotonic() + LONGEST_SECONDS
    while time.monotonic() < until:
        found = poll()
        if found:
            return found
        time.sleep(0.02)
    raise AssertionError(f"{what} did not happen within {LONGEST_SECONDS} s")


def _note(path: Path) -> dict[str, str] | None:
    try:
        found: dict[str, str] = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return found
