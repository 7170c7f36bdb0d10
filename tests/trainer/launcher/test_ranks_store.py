"""The store of the ranks, in a process of its own beside them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from trainer.launcher.launchers import Gang, await_ends, is_alive

Make = Callable[..., Gang]


def store_of(job: Gang, restart: int = 0) -> int:
    """The process of the store: the only child of the fork server that is no rank."""
    server = next(iter(job.await_start_notes(restart).values()))["parent"]
    children = Path(f"/proc/{server}/task/{server}/children").read_text().split()
    # One that has ended stays a child until the server has looked.
    (store,) = {int(pid) for pid in children if is_alive(int(pid))} - set(job.rank_pids(restart))
    return store


def test_ranks_of_each_round_have_a_store_of_their_own_that_ends_with_it(gang: Make) -> None:
    job = gang()
    launcher = job.start("work")
    first = store_of(job)
    os.kill(job.rank_pids()[0], signal.SIGKILL)
    job.await_start_notes(restart=1)
    await_ends([first])
    second = store_of(job, restart=1)
    launcher.kill()
    await_ends([second])


def test_ranks_that_lose_their_store_meet_in_another(gang: Make) -> None:
    job = gang(ranks=1)
    launcher = job.start("meet")
    os.kill(store_of(job), signal.SIGKILL)
    assert launcher.exit_code() == 0, launcher.log.read_text()
    said = launcher.log.read_text()
    # Whichever is noticed first: the rank fails at once where it talks to its store.
    assert "the store in which ranks meet has ended" in said or "rank 0 ended with exit code 1: " in said


def test_ranks_whose_store_ends_while_they_need_none_are_started_again(gang: Make) -> None:
    job = gang()
    launcher = job.start("work")
    os.kill(store_of(job), signal.SIGKILL)
    job.await_start_notes(restart=1)
    assert "the store in which ranks meet has ended" in launcher.log.read_text()


def test_ctrl_c_in_a_terminal_leaves_the_store_to_ranks_that_save(gang: Make) -> None:
    job = gang()
    job.start("work")
    store = store_of(job)
    assert os.getsid(store) == store


def test_a_launcher_imports_no_torch() -> None:
    command = "import sys, moejob_trainer.launcher.launch; print('torch' in sys.modules)"
    said = subprocess.run([sys.executable, "-c", command], capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "False"
