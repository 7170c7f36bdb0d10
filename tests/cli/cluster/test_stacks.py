"""The lines of `moejob stacks`: equal stacks together, the fewest ranks first, nothing that a terminal obeys."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moejob_api.contract.stacks import RankStacks
from moejob_cli.cluster.stacks import rank_ranges, stack_lines
from moejob_client.rank_stacks import PodStacks

WAITS = ("Thread 0x00007f0000000001 (most recent call first):", '  File "c10d.py", line 9 in all_reduce')
SAME = ("Current thread 0x00007f0000000009 (most recent call first):", "", '  File "c10d.py", line 9 in all_reduce')
HANGS = ("Current thread 0x00007f0000000002 (most recent call first):", '  File "reward.py", line 3 in score')


def test_the_rank_that_differs_comes_first_and_equal_ones_are_together() -> None:
    pods = [
        PodStacks("job-0", "node-1", (RankStacks(0, 1, WAITS), RankStacks(1, 2, SAME), RankStacks(2, 3, HANGS))),
        PodStacks("job-1", "node-2", (RankStacks(3, 1, SAME), RankStacks(4, 2, (), "it is stopped"))),
        PodStacks("job-2", "node-3", (), "no rank runs in it yet"),
        PodStacks("spare", "node-4", ()),
    ]
    assert [*stack_lines(pods)] == [
        "[rank 4 node-2] it is stopped",
        "[job-2 node-3] no rank runs in it yet",
        "[spare node-4] no rank runs in it",
        "[rank 2 node-1]",
        "Thread (most recent call first):",
        HANGS[1],
        "",
        "[ranks 0-1, 3 on 2 nodes]",
        "Thread (most recent call first):",
        WAITS[1],
        "",
    ]


@pytest.mark.parametrize(
    ("ranks", "text"), [([3], "3"), ([2, 0, 1], "0-2"), ([0, 2, 3, 9], "0, 2-3, 9")], ids=["one", "run", "runs"]
)
def test_ranks_are_written_as_ranges(ranks: list[int], text: str) -> None:
    assert rank_ranges(ranks) == text


def test_a_run_that_does_not_run_is_one_sentence(tmp_path: Path) -> None:
    # Any Python with the module will do: it looks at this machine's processes alone.
    stand_in = tmp_path / "moejob_trainer" / "launcher"
    stand_in.mkdir(parents=True)
    for folder in (stand_in.parent, stand_in):
        (folder / "__init__.py").touch()
    (stand_in / "stack_report.py").touch()
    environment = os.environ | {"MOEJOB_TRAINER_PYTHON": sys.executable, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "moejob_cli", "stacks", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert (done.returncode, done.stdout, len(done.stderr.splitlines())) == (3, "", 1)
    assert f"no rank of {tmp_path} runs on this machine" in done.stderr
