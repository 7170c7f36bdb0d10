"""Engines of their own beside the launchers of a run, as real processes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moejob_cli.running.engines import FailedStart, RunEngines
from moejob_cli.running.launchers import EngineOrder

# It has a worker, as vLLM has.
_ENGINE = """#!/bin/bash
sleep 1000 &
echo "$$ $! $INDEX $*" >>"$(dirname "$0")/started"
trap 'kill %1; exit 0' TERM
wait
"""


@pytest.fixture
def engines(tmp_path: Path) -> Iterator[RunEngines]:
    program = tmp_path / "engine"
    program.write_text(_ENGINE)
    program.chmod(0o755)
    made = RunEngines(program, [EngineOrder(index, {"INDEX": str(index)}) for index in (0, 1)], tmp_path)
    yield made
    made.end_engines()


def eventually(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < until
        time.sleep(0.02)


def started(folder: Path, count: int) -> list[list[str]]:
    note = folder / "started"
    eventually(lambda: note.exists() and len(note.read_text().splitlines()) >= count)
    return [line.split() for line in note.read_text().splitlines()]


def lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_engines_start_and_end_with_their_workers(engines: RunEngines, tmp_path: Path) -> None:
    assert engines.keep_running() == []
    seen = started(tmp_path, 2)
    assert sorted(said for _, _, *said in seen) == [["0", "-m", "moejob_rollout"], ["1", "-m", "moejob_rollout"]]
    engines.end_engines()
    eventually(lambda: not any(lives(pid) for first, second, *_ in seen for pid in (first, second)))


def test_an_engine_that_died_is_named_and_started_again(engines: RunEngines, tmp_path: Path) -> None:
    engines.keep_running()
    first, worker, index, *_ = started(tmp_path, 2)[0]
    os.kill(int(first), signal.SIGKILL)
    said: list[str] = []

    def has_said() -> bool:
        said.extend(engines.keep_running())
        return bool(said)

    eventually(has_said)
    assert said == [f"engine {index} ended with -9 and is started again"]
    assert engines.engine_ends == {0: 0, 1: 0} | {int(index): 1}
    eventually(lambda: not lives(worker))
    eventually(lambda: engines.keep_running() == [] and len(started(tmp_path, 2)) == 3)
    engines.forget_ends()
    assert engines.engine_ends == {0: 0, 1: 0}


def test_an_engine_that_cannot_start_is_refused_with_its_last_line(tmp_path: Path) -> None:
    program = tmp_path / "engine"
    program.write_text("#!/bin/bash\necho 'no such model' >&2\nexit 78\n")
    program.chmod(0o755)
    engines = RunEngines(program, [EngineOrder(0, {})], tmp_path)
    assert (engines.keep_running(), engines.failed_start()) == ([], None)
    eventually(lambda: engines.keep_running() != [])
    assert engines.failed_start() == FailedStart("engine 0 cannot start: no such model", is_misconfigured=True)
    engines.end_engines()


def test_an_engine_that_dies_at_each_start_is_refused_for_a_reason_that_may_pass(tmp_path: Path) -> None:
    program = tmp_path / "engine"
    program.write_text("#!/bin/bash\necho 'out of memory' >&2\nexit 1\n")
    program.chmod(0o755)
    engines = RunEngines(program, [EngineOrder(0, {})], tmp_path, again_seconds=0.0)

    def is_refused() -> bool:
        engines.keep_running()
        return engines.failed_start() is not None

    eventually(is_refused)
    refusal = engines.failed_start()
    assert refusal is not None
    assert (refusal.is_misconfigured, refusal.message[-13:]) == (False, "out of memory")
    engines.end_engines()
