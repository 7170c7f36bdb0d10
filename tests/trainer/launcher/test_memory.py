"""Kills for memory are read where the kernel counts them."""

from __future__ import annotations

from pathlib import Path

import pytest

from moejob_trainer.launcher.memory import kills_for_memory


@pytest.mark.parametrize(
    ("file", "text", "kills"),
    [
        pytest.param("memory.events", "low 0\nhigh 0\nmax 7\noom 2\noom_kill 2\noom_group_kill 1\n", 2, id="version 2"),
        pytest.param("memory/memory.oom_control", "oom_kill_disable 0\nunder_oom 0\noom_kill 3\n", 3, id="version 1"),
        pytest.param("memory.events", "low 0\n", 0, id="a kernel that does not count"),
        pytest.param("elsewhere", "oom_kill 5\n", 0, id="no such file"),
    ],
)
def test_kills_are_read_from_the_cgroup_of_the_container(tmp_path: Path, file: str, text: str, kills: int) -> None:
    path = tmp_path / file
    path.parent.mkdir(exist_ok=True)
    path.write_text(text)
    assert kills_for_memory(tmp_path) == kills
