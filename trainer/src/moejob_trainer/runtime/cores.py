"""The cores that this process may use: those it may run on, and no more than its container's limit.

A container with a limit sees all cores of its node. Threads beyond the limit use up its share of each tenth of a second
while they wait for one another, and then all of them stand still.
"""

from __future__ import annotations

import os
from pathlib import Path

# The container's own cgroup, at the root of what it sees.
CGROUPS = Path("/sys/fs/cgroup")


def count_cores(cgroups: Path = CGROUPS) -> int:
    """Return the whole cores of this process, one at least."""
    cores = len(os.sched_getaffinity(0))
    limit = _limit_in_cores(cgroups)
    return cores if limit is None else max(1, min(cores, int(limit)))


def _limit_in_cores(cgroups: Path) -> float | None:
    """Return the limit of version 2 of cgroups, or of version 1; None without one."""
    quota, period = _read_numbers(cgroups / "cpu.max")
    if period is None:
        quota, _ = _read_numbers(cgroups / "cpu" / "cpu.cfs_quota_us")
        period, _ = _read_numbers(cgroups / "cpu" / "cpu.cfs_period_us")
    return None if quota is None or not period else quota / period


def _read_numbers(file: Path) -> tuple[int | None, int | None]:
    """Return the first two numbers of a file; None for each that is absent, negative or "max"."""
    try:
        words = [*file.read_text("ascii").split(), "", ""]
    except (OSError, UnicodeDecodeError):
        return None, None
    first, second = (int(word) if word.isdigit() else None for word in words[:2])
    return first, second
