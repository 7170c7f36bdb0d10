"""A launcher in its last act: what each of its lives does is written in the run's script.

The script ($STAND_IN) is JSON: for each pod a list of lives, each a list of acts; the last life is repeated and
again.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import FrameType
from typing import Any

from moejob_api.contract.pods import (
    Environment,
    PodOutcome,
    PodProgress,
    ReportedHeartbeat,
    RunFile,
    RunProgress,
    TerminationMessage,
    fence_token_name,
)

_OUTCOMES = {0: PodOutcome.COMPLETED, 78: PodOutcome.BAD_CONFIGURATION, 143: PodOutcome.PREEMPTED}
_LONGEST_SECONDS = 60.0


class Life:
    """One launcher: what it says of itself, and what it does."""

    def __init__(self, last_word: Path) -> None:
        self.index = int(os.environ[Environment.INDEX])
        self.attempt = int(os.environ[Environment.ATTEMPT])
        self.folder = Path(os.environ[Environment.RUN_FOLDER])
        self.last_word = last_word
        self.asked = 0
        self.is_served = threading.Event()
        self.restarts, self.age, self.step = 0, 0.0, 0
        self.saved: int | None = None
        self.is_ready = True
        self.breaks_off = False

    def note(self) -> int:
        """Leave a note of this life; its number among those of this pod."""
        notes = self.folder / "lives"
        notes.mkdir(exist_ok=True)
        number = len(list(notes.glob(f"{self.index}-*.json")))
        (notes / f"{self.index}-{number}.json").write_text(json.dumps({"pid": os.getpid(), **os.environ}))
        if self.index == 0:
            (self.folder / RunFile.CLAIMS).mkdir(exist_ok=True)
            (self.folder / RunFile.CLAIMS / fence_token_name(self.attempt, 0)).touch()
        return number

    def ask(self, _number: int, _frame: FrameType | None) -> None:
        # Takes no lock, for the thread that it interrupts may hold it.
        self.asked += 1

    def waits_until(self, is_so: Callable[[], bool]) -> None:
        """Wait until it is so, or for the longest time that a test takes."""
        until = time.monotonic() + _LONGEST_SECONDS
        while not is_so() and time.monotonic() < until:
            time.sleep(0.02)

    def progress(self) -> str:
        ranks = int(os.environ[Environment.RANKS_PER_NODE])
        said = PodProgress(
            attempt=self.attempt,
            index=self.index,
            restarts=self.restarts,
            ready=self.is_ready,
            ranks=tuple(
                ReportedHeartbeat(
                    rank=self.index * ranks + local, pid=os.getpid(), step=self.step, age_seconds=self.age
                )
                for local in range(ranks)
            ),
            run=RunProgress(step=self.step, total_steps=4, last_checkpoint_step=self.saved) if not self.index else None,
        )
        return said.model_dump_json(by_alias=True, exclude_none=True)

    # --- acts ---------------------------------------------------------------------------------------------------------

    def steps(self, count: int) -> None:
        """Train that many steps."""
        for _ in range(count):
            self.log_step({})

    def rewards(self, flat: int, groups: int, truncated: float) -> None:
        """Make a step of GRPO whose groups have equal rewards, all but a few."""
        self.log_step({"reward": 0.0, "groups": groups, "groupsWithoutSignal": flat, "truncated": truncated})

    def log_step(self, measures: dict[str, float]) -> None:
        """Write a line of the step log."""
        self.step += 1
        line = {"step": self.step, "loss": 4.0 / self.step, "seconds": 0.01, "tokens": 100, "attempt": self.attempt}
        with (self.folder / RunFile.STEPS).open("a") as log:
            log.write(json.dumps(line | measures) + "\n")

    def resumes(self, step: int) -> None:
        """Go on after a checkpoint."""
        self.step = self.saved = step

    def saves(self) -> None:
        """Commit a checkpoint."""
        self.saved = self.step
        if self.step and not self.index:
            checkpoint = self.folder / RunFile.CHECKPOINTS / f"step-{self.step}.{self.attempt}.0"
            checkpoint.mkdir(parents=True, exist_ok=True)
            (checkpoint / "complete.json").touch()

    def restarts_ranks(self) -> None:
        """Restart the ranks in place, once the restarts before have been heard."""
        self.was_heard()
        self.restarts += 1

    def was_heard(self) -> None:
        """Continue after two polls: the state before the act has been reported."""
        for _ in range(2):
            self.is_served.clear()
            self.is_served.wait(_LONGEST_SECONDS)

    def breaks_off_answers(self) -> None:
        """Be asked in one's last moment: of each answer the end is missing."""
        self.breaks_off = True
        self.was_heard()

    def ages(self, seconds: float) -> None:
        """Ranks that have been silent for that long."""
        self.age = seconds

    def waits_for(self, name: str) -> None:
        """Wait until a file is there."""
        self.waits_until((self.folder / name).exists)

    def saves_when_asked(self) -> None:
        """Run until asked to stop; then save."""
        self.waits_until(lambda: self.asked > 0)
        self.saves()
        self.ends(143, "asked to stop, and stopped after saving")

    def stops_when_asked(self) -> None:
        """Run until asked to stop, with nothing to save."""
        self.waits_until(lambda: self.asked > 0)
        self.ends(143, "asked to stop")

    def fails_when_asked(self) -> None:
        """Run until asked to stop, and fail to save."""
        self.waits_until(lambda: self.asked > 0)
        self.ends(1, "the disk is full")

    def saves_for_ever(self) -> None:
        """Be asked to stop, and end only when asked again."""
        self.waits_until(lambda: self.asked > 1)
        self.ends(1, "was asked to stop again")

    def is_killed(self) -> None:
        """Vanish without a word."""
        os.kill(os.getpid(), signal.SIGKILL)

    def ends(self, code: int, message: str = "as told") -> None:
        """Leave a last word and go."""
        word = TerminationMessage(outcome=_OUTCOMES.get(code, PodOutcome.RANK_FAILED), message=message, step=self.step)
        self.last_word.write_text(word.model_dump_json(by_alias=True, exclude_none=True))
        sys.stdout.flush()
        os._exit(code)


def served(life: Life) -> None:
    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = life.progress().encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body[:-1] if life.breaks_off else body)
            life.is_served.set()

        def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the name is the base class's
            """Say nothing."""

    address = os.environ[Environment.HOST], int(os.environ[Environment.PROGRESS_PORT])
    server = ThreadingHTTPServer(address, Answers)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--last-word", type=Path)
    parser.add_argument("--logs", type=Path)
    life = Life(parser.parse_args().last_word)
    for asked in (signal.SIGTERM, signal.SIGINT):
        signal.signal(asked, life.ask)
    number = life.note()
    served(life)
    lives: list[list[Any]] = json.loads(os.environ["STAND_IN"])[str(life.index)]
    for act, *arguments in lives[min(number, len(lives) - 1)]:
        getattr(life, act)(*arguments)
    life.ends(0)


main()
