"""The costs of a process, as the kernel says."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Costs:
    """Of one process, until now."""

    cpu_seconds: float
    resident_mib: float
    descriptors: int
    threads: int


def costs(pid: int) -> Costs:
    """Read them."""
    process = Path("/proc", str(pid))
    # Behind the name, which may hold anything: user and system time are the 14th and 15th field of all.
    times = (process / "stat").read_text().rpartition(")")[2].split()[11:13]
    status = dict(line.split(":", 1) for line in (process / "status").read_text().splitlines())
    return Costs(
        cpu_seconds=sum(map(int, times)) / _TICKS,
        resident_mib=int(status["VmRSS"].split()[0]) / 1024,
        descriptors=len(os.listdir(process / "fd")),  # noqa: PTH208 - names are enough
        threads=int(status["Threads"]),
    )
