"""Stacks of ranks that run: all ranks have them, none is hurt by it, and those that cannot write say why."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from itertools import chain
from pathlib import Path

from moejob_api.contract.stacks import STACKS_MODULE, RankStacks, parse_stacks_line
from moejob_trainer.launcher.stacks import STACKS, RankProcess, read_stacks
from trainer.launcher.launchers import LONGEST_SECONDS, Gang, is_alive

Make = Callable[..., Gang]

# Becomes a rank, tells its process, and waits; threads of libraries block every signal.
RANK = """
import os, signal, sys, threading, time
from moejob_trainer.launcher import stacks
stacks.open_stacks(3)
def wait_in_a_library():
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    time.sleep(600)
threading.Thread(target=wait_in_a_library, daemon=True).start()
time.sleep(0.1)
print(os.getpid(), flush=True)
time.sleep(600)
"""
NO_RANK = """
import os, sys, time
file = os.memfd_create(f"moejob-stacks-5-{os.getpid()}")
print(os.getpid(), flush=True)
time.sleep(600)
"""
# An exec takes handlers away: the signal that comes on the way is held back, and the new program answers it.
EXECUTED = """
import os, signal, sys
from moejob_trainer.launcher import stacks
stacks.inherit_handler()
stacks.hold_back_signal()
program = "import time; from moejob_trainer.launcher import stacks; time.sleep(1); stacks.open_stacks(0); print(1)"
os.kill(os.getpid(), stacks.STACKS)
os.execv(sys.executable, [sys.executable, "-c", program])
"""


def start_program(program: str) -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.readline()
    return process


def report_stacks(folder: Path) -> list[RankStacks]:
    command = [sys.executable, "-m", STACKS_MODULE, "--run-folder", str(folder)]
    output = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return [stacks for stacks in map(parse_stacks_line, output.splitlines()) if stacks is not None]


def test_every_rank_writes_its_stacks_and_continues(gang: Make) -> None:
    job = gang(nodes=2)
    job.start_all("work")
    pids = job.rank_pids()
    for _ in range(2):
        stacks = report_stacks(job.run_folder)
        assert [(each.rank, each.pid, each.problem) for each in stacks] == [(n, pids[n], "") for n in range(4)]
        # The second time they begin again.
        for name in (" in for_ever", " in enter_rank"):
            assert [sum(line.endswith(name) for line in each.lines) for each in stacks] == [1] * 4
    assert all(map(is_alive, pids))


def test_no_rank_is_killed_however_early_it_is_asked(gang: Make) -> None:
    job = gang(idle_import_seconds=30)
    launcher = job.start("finish_when_allowed")
    until = time.monotonic() + LONGEST_SECONDS
    # Of each process asked, when it is asked again, and how long after that. On busy cores one that only writes stacks
    # would never start, so the time between two signals grows.
    asked: dict[int, tuple[float, float]] = {}
    # Every descendant but the fork server, from its fork on: the kernel delivers the signal whenever it comes.
    while len(list(job.run_folder.glob("start-0-*.json"))) < 2:
        assert time.monotonic() < until, launcher.log.read_text()[-2000:]
        for pid in chain.from_iterable(map(children, children(launcher.pid))):
            due, gap = asked.get(pid, (0.0, 0.005))
            if time.monotonic() >= due:
                send_signal(pid)
                asked[pid] = time.monotonic() + gap, gap * 1.2
        time.sleep(0.002)
    pids = job.rank_pids()
    assert set(pids) <= asked.keys()
    for pid in pids:
        send_signal(pid)
    job.allow("go")
    assert launcher.exit_code() == 0
    assert not list(job.run_folder.glob("start-1-*.json"))


def test_a_signal_during_an_exec_waits_for_the_new_program() -> None:
    done = subprocess.run([sys.executable, "-c", EXECUTED], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n")


def test_threads_that_block_every_signal_hold_up_no_reader() -> None:
    process = start_program(RANK)
    found = RankProcess.find_rank(process.pid)
    assert found is not None
    began = time.monotonic()
    [stacks] = read_stacks([found], 30)
    assert (stacks.rank, stacks.problem) == (3, "")
    assert any("in wait_in_a_library" in line for line in stacks.lines)
    assert time.monotonic() - began < 10
    process.kill()


def test_a_stopped_rank_is_said_to_be_stopped_and_answers_later() -> None:
    process = start_program(RANK)
    found = RankProcess.find_rank(process.pid)
    assert found is not None
    process.send_signal(signal.SIGSTOP)
    [stacks] = read_stacks([found], 0.2)
    assert (stacks.lines, "T (stopped)" in stacks.problem) == ((), True)
    process.send_signal(signal.SIGCONT)
    [stacks] = read_stacks([found], 30)
    assert stacks.lines[-1] == '  File "<string>", line 11 in <module>'
    process.kill()


def test_a_process_without_a_handler_gets_no_signal() -> None:
    process = start_program(NO_RANK)
    found = RankProcess.find_rank(process.pid)
    assert found is not None
    [stacks] = read_stacks([found], 5)
    assert "has no handler" in stacks.problem
    assert process.poll() is None
    process.kill()


def test_a_rank_that_has_ended_is_no_error() -> None:
    process = start_program(RANK)
    found = RankProcess.find_rank(process.pid)
    assert found is not None
    process.kill()
    process.wait()
    [stacks] = read_stacks([found], 5)
    assert (stacks.lines, stacks.problem) == ((), "it cannot be asked: No such process")
    assert RankProcess.find_rank(process.pid) is None


def children(pid: int) -> list[int]:
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except OSError:
        return []


def send_signal(pid: int) -> None:
    try:
        os.kill(pid, STACKS)
    except ProcessLookupError:
        return
