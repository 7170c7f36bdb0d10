"""Measures inside of a process that serves: the longest its event loop answered nothing, and the memory it took."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

_TICK_SECONDS = 0.005


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one attack, in the process that was attacked."""

    gap_ms: float
    resident_mib: float
    peak_mib: float

    @property
    def growth_mib(self) -> float:
        """Return what the attack added at its worst moment."""
        return self.peak_mib - self.resident_mib


class GapProbe:
    """Sleeps for moments where it watches, and keeps by how much the longest was late.

    Only as far as this process computed meanwhile, in whichever thread: while others have its core, and attackers on
    the same machine are such, nothing of it could be answered whatever its code does.
    """

    def __init__(self) -> None:
        self.gap_seconds = 0.0

    async def run_in_loop(self) -> None:
        """Watch the event loop that this runs in."""
        while True:
            before = self._now()
            await asyncio.sleep(_TICK_SECONDS)
            self._keep(before)

    def run_in_thread(self) -> None:
        """Watch threads like this one."""
        while True:
            before = self._now()
            time.sleep(_TICK_SECONDS)
            self._keep(before)

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def _keep(self, before: tuple[float, float]) -> None:
        clock, computed = (now - then for now, then in zip(self._now(), before, strict=True))
        self.gap_seconds = max(self.gap_seconds, min(clock - _TICK_SECONDS, computed))


def serve_until_told(port: int, gap_seconds: Callable[[], float], begin: Callable[[], None]) -> None:
    """Say where, then let each line of standard input begin an attack or end it: `begin`, `end`."""
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    before = 0.0
    for line in sys.stdin:
        if line.strip() == "begin":
            _forget_peak()
            begin()
            before = _mib("VmRSS")
            said = "{}"
        else:
            said = json.dumps(asdict(Measured(1000 * gap_seconds(), before, _mib("VmHWM"))))
        sys.stdout.write(f"{said}\n")
        sys.stdout.flush()


def _forget_peak() -> None:
    # 5: the most that was resident becomes what is now.
    Path("/proc/self/clear_refs").write_text("5")


def _mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024
