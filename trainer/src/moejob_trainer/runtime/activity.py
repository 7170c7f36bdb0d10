"""Evidence that processes work: what they compute, read and write, as the kernel counts it.

Between start and the first step, and after the last one, no fixed time is right: 600 GB of weights take an hour to
load. A process that loads, tokenizes, checks or exports computes or moves bytes all along; one that hangs (on a volume
that does not answer, a lock, a service) does neither. Children count, for data is prepared by processes of its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

# Threads that look at the network a hundred times a second take a quarter percent of a core; a process that loads from
# a slow volume reads megabytes a second. Both bounds lie an order of magnitude above idling and below working.
_WORKING_SHARE = 0.05
_WORKING_BYTES_PER_SECOND = 16 * 1024
# Fields of /proc/PID/stat behind the name: utime and stime, of the process and of the children that it has reaped.
_TIMES = slice(11, 15)
_COUNTED = ("rchar", "wchar", "read_bytes", "write_bytes")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Activity:
    """The work of a process and its descendants since each began."""

    cpu_seconds: float
    moved_bytes: int


def read_activity(pid: int) -> Activity:
    """Read the work of a process and its descendants so far; zero for a process that is gone."""
    pids = tuple(_process_family(pid))
    return Activity(sum(map(_cpu_seconds, pids)), sum(map(_moved_bytes, pids)))


def has_worked(before: Activity, now: Activity, seconds: float) -> bool:
    """Return whether a process worked in the seconds between; pure."""
    computed, moved = now.cpu_seconds - before.cpu_seconds, now.moved_bytes - before.moved_bytes
    return computed >= _WORKING_SHARE * seconds or moved >= _WORKING_BYTES_PER_SECOND * seconds


def _process_family(pid: int) -> Iterator[int]:
    yield pid
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with suppress(OSError):
                for child in (task / "children").read_text().split():
                    yield from _process_family(int(child))


def _cpu_seconds(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, fields[_TIMES])) / _TICKS


def _moved_bytes(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/io").read_text(encoding="ascii").splitlines()
    except OSError:
        # It has ended, or this kernel does not show it.
        return 0
    counts = dict(line.split(": ") for line in lines)
    return sum(int(counts.get(name, 0)) for name in _COUNTED)
