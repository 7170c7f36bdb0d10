"""Cases that the same processes measure one after the other: imports, contexts and kernels are paid once.

A case that fails is a result too: when all ranks report within some seconds, the same processes continue with the rest.
When one does not, because it waits for an exchange that the failed rank never enters, the ranks end, and torchrun
starts them again with `--max-restarts`; they continue behind the case that ended them, which a file remembers.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

from benchmarks.trainer.engines import Ranks

Line = Mapping[str, object]
# All ranks end a case within moments of one another, or one of them never does.
AGREE_SECONDS = 30
ERROR_LETTERS = 400


@dataclass(frozen=True, slots=True)
class CaseLog:
    """A file beside one launch of the ranks: the cases that were begun, and the lines of those that ended."""

    file: Path

    @classmethod
    def of_launch(cls) -> CaseLog:
        """Return the log of what started this process: the same for all ranks, and when they are started again."""
        launch = f"{os.environ.get('TORCHELASTIC_RUN_ID', 'alone')}-{os.getppid()}"
        name = f"cases-{launch}.jsonl" if "TORCHELASTIC_RUN_ID" in os.environ else f"cases-{os.getpid()}.jsonl"
        return cls(Path(tempfile.gettempdir()) / name)

    def begin(self, number: int) -> None:
        """Note that a case is tried."""
        self._append({"begun": number})

    def end(self, line: Line) -> None:
        """Note what came of it."""
        self._append({"line": line})

    def begun_cases(self) -> int:
        """Return how many cases were tried."""
        return sum("begun" in entry for entry in self._entries())

    def lines(self) -> list[Line]:
        """Return what came of those that ended."""
        return [entry["line"] for entry in self._entries() if "line" in entry]

    def _entries(self) -> list[dict[str, Line]]:
        return [json.loads(line) for line in self.file.read_text().splitlines()] if self.file.exists() else []

    def _append(self, entry: Mapping[str, object]) -> None:
        with self.file.open("a") as file:
            file.write(json.dumps(entry) + "\n")


def in_turn(
    names: Sequence[str], measure: Callable[[int, torch.device], Line], most_seconds: float
) -> list[Line] | None:
    """Measure all cases, printing the line of each as soon as it is there. Return all lines, on rank 0.

    most_seconds: the ranks end when a case takes longer.
    """
    ranks, log = Ranks.of_launch(), CaseLog.of_launch()
    for number in range(_first(ranks, log), len(names)):
        if ranks.rank == 0:
            log.begin(number)
            print(f"case {number + 1} of {len(names)}: {names[number]}", file=sys.stderr, flush=True)
        begun = time.perf_counter()
        with _ended_after(most_seconds, names[number]):
            line = _run_case(ranks, number, names[number], measure)
        if ranks.rank == 0:
            whole = {**line, "wallSeconds": round(time.perf_counter() - begun, 1)}
            print(json.dumps(whole), flush=True)
            log.end(whole)
    if ranks.rank != 0:
        return None
    lines = log.lines()
    log.file.unlink(missing_ok=True)
    return lines


def _first(ranks: Ranks, log: CaseLog) -> int:
    """Return the number of the case to begin with. Rank 0 says: the others may read a file that it has moved on."""
    key = f"first-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if ranks.rank == 0:
        ranks.store.set(key, str(log.begun_cases()))
    return int(ranks.store.get(key))


def _run_case(ranks: Ranks, number: int, name: str, measure: Callable[[int, torch.device], Line]) -> Line:
    outcome = _try_case(ranks, number, measure)
    outcomes = _everyones(ranks, f"{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}/outcome/{number}", name, outcome)
    failed = [one for one in outcomes if "error" in one]
    ranks.part(is_broken=bool(failed))
    return {"name": name, **failed[0]} if failed else outcome


def _try_case(ranks: Ranks, number: int, measure: Callable[[int, torch.device], Line]) -> Line:
    try:
        ranks.join(f"case-{number}")
        return measure(number, ranks.device)
    # Of a case that fails only the words are kept: its traceback would hold its tensors.
    except Exception as error:  # noqa: BLE001
        return {"error": f"{type(error).__name__}: {error}"[:ERROR_LETTERS], "rank": ranks.rank}


def _everyones(ranks: Ranks, key: str, name: str, outcome: Line) -> list[Line]:
    """Return what every rank reports; end this process where one of them never does."""
    keys = [f"{key}/{rank}" for rank in range(ranks.size)]
    ranks.store.set(keys[ranks.rank], json.dumps(outcome))
    try:
        ranks.store.wait(keys, timedelta(seconds=AGREE_SECONDS))
    except dist.DistStoreError:
        _end({"name": name, **outcome, "ended": f"other ranks have not reported within {AGREE_SECONDS} s"})
    return [json.loads(ranks.store.get(one)) for one in keys]


@contextmanager
def _ended_after(seconds: float, name: str) -> Iterator[None]:
    """End this process when what is in the block takes longer: nothing else stops what waits for a GPU."""
    line = {"name": name, "error": f"not done in {seconds:.0f} s"}
    timer = threading.Timer(seconds, _end, [line])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _end(line: Line) -> None:
    print(json.dumps(line), flush=True)
    os._exit(1)
