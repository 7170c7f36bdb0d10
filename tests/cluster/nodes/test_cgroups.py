"""Cgroups of a cluster, of either version that the kernel shows, go with the processes in them."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from cluster.nodes.cgroups import ROOT, Cgroup

# Where a machine of version 1 shows version 2 beside it.
UNIFIED = ROOT / "unified"
VERSIONS = [
    pytest.param(ROOT, id="as the machine has them"),
    pytest.param(
        UNIFIED,
        id="version 2 beside version 1",
        marks=pytest.mark.skipif(not UNIFIED.is_dir(), reason="no version 2 beside version 1 here"),
    ),
]
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root makes cgroups")


@pytest.mark.parametrize("root", VERSIONS)
def test_a_cgroup_goes_with_the_processes_below_it(root: Path) -> None:
    above, below = Cgroup("moejob-tried", root), Cgroup("moejob-tried/node/pod", root)
    below.create()
    sleep = subprocess.Popen(["sleep", "600"])  # noqa: S607
    try:
        for folder in below.folders:
            (folder / "cgroup.procs").write_text(str(sleep.pid))
        assert above.pids() == above.pids("pod") == {sleep.pid}
        assert above.pids("other") == set()
        above.remove()
        assert sleep.wait(10) == -9
    finally:
        sleep.kill()
        sleep.wait()
    assert not any(folder.exists() for folder in above.folders)


@pytest.mark.parametrize("root", VERSIONS)
def test_removing_what_is_not_there_is_no_mistake(root: Path) -> None:
    Cgroup("moejob-never", root).remove()
