"""Kills for memory are read where the kernel counts them, and what may be pinned where it limits that."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from builders import spec
from moejob_trainer.launcher.memory import count_memory_kills, pinning_trouble

CARDS = {"rdma": {"resource": "rdma/hca", "count": 8}}


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
    assert count_memory_kills(tmp_path) == kills


@pytest.mark.parametrize(
    ("resources", "limit_bytes", "warns"),
    [
        pytest.param(CARDS, 8 << 20, True, id="cards and the usual limit of systemd"),
        pytest.param(CARDS, resource.RLIM_INFINITY, False, id="cards and no limit"),
        pytest.param({}, 8 << 20, False, id="no cards"),
    ],
)
def test_a_node_that_limits_pinned_memory_is_named_where_cards_need_it(
    resources: dict[str, object], limit_bytes: int, warns: bool
) -> None:
    trouble = pinning_trouble(spec(resources=resources), limit_bytes)
    assert (trouble is not None) is warns
    assert trouble is None or ("8.0 MiB" in trouble and "LimitMEMLOCK=infinity" in trouble)
