"""Evidence that processes work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from moejob_trainer.runtime.activity import Activity, has_worked, read_activity

COMPUTES = "while True: pass"
READS = "f = open('/dev/zero', 'rb', buffering=0)\nwhile True: f.read(1 << 20)"
WAITS = "import signal\nprint(flush=True)\nsignal.pause()"
A_CHILD_COMPUTES = f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {COMPUTES!r}])"
LONGEST_SECONDS = 300.0


@contextmanager
def running(program: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            yield process
        finally:
            os.killpg(process.pid, signal.SIGKILL)


def has_ever_worked(pid: int) -> bool:
    until = time.monotonic() + LONGEST_SECONDS
    while time.monotonic() < until:
        before, began = read_activity(pid), time.monotonic()
        time.sleep(0.2)
        if has_worked(before, read_activity(pid), time.monotonic() - began):
            return True
    return False


@pytest.mark.parametrize(
    ("cpu_seconds", "moved_bytes", "expected"),
    [
        pytest.param(0.0, 0, False, id="nothing"),
        pytest.param(0.02, 4_000, False, id="threads that look at the network, and a log"),
        pytest.param(0.5, 0, True, id="a tenth of a core"),
        pytest.param(0.0, 5_000_000, True, id="a slow volume"),
    ],
)
def test_work_is_more_than_idling_takes(cpu_seconds: float, moved_bytes: int, expected: bool) -> None:
    before = Activity(10.0, 1000)
    assert has_worked(before, Activity(10.0 + cpu_seconds, 1000 + moved_bytes), 5.0) is expected


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(COMPUTES, id="computes"),
        pytest.param(READS, id="reads"),
        pytest.param(A_CHILD_COMPUTES, id="a child computes"),
    ],
)
def test_a_process_that_computes_or_reads_works(program: str) -> None:
    with running(program) as process:
        assert has_ever_worked(process.pid)


def test_a_process_that_waits_or_is_stopped_does_not_work() -> None:
    with running(WAITS) as waits, running(COMPUTES) as stopped:
        assert waits.stdout is not None
        waits.stdout.readline()
        os.kill(stopped.pid, signal.SIGSTOP)
        os.waitid(os.P_PID, stopped.pid, os.WSTOPPED)
        before = [read_activity(process.pid) for process in (waits, stopped)]
        assert stopped.poll() is None
        time.sleep(0.5)
        after = [read_activity(process.pid) for process in (waits, stopped)]
    assert not any(has_worked(*pair, 0.5) for pair in zip(before, after, strict=True))


def test_a_process_that_is_gone_has_no_work() -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        process.wait()
    assert read_activity(process.pid) == Activity(0.0, 0)
