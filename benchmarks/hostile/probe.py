"""Measurements inside a process that serves: the longest silence of its event loop, and its memory."""

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
    """Measurements of one attack, taken in the process under attack."""

    gap_ms: float
    resident_mib: float
    peak_mib: float

    @property
    def growth_mib(self) -> float:
        """Return the memory that the attack added at its worst moment."""
        return self.peak_mib - self.resident_mib


class GapProbe:
    """Sleeps for short moments in a loop or a thread, and keeps the longest delay of a wake-up.

    A delay counts only as far as this process computed meanwhile, in any thread: while another process has the core,
    as attackers on this machine do, no code of this one could answer.
    """

    def __init__(self) -> None:
        self.gap_seconds = 0.0

    async def run_in_loop(self) -> None:
        """Watch the event loop that this runs in."""
        while True:
            before = self._now()
            await asyncio.sleep(_TICK_SECONDS)
            self._keep_longest(before)

    def run_in_thread(self) -> None:
        """Watch the thread that this runs in."""
        while True:
            before = self._now()
            time.sleep(_TICK_SECONDS)
            self._keep_longest(before)

    def _now(self) -> tuple[float, float]:
        return time.perf_counter(), time.process_time()

    def _keep_longest(self, before: tuple[float, float]) -> None:
        clock, computed = (now - then for now, then in zip(self._now(), before, strict=True))
        self.gap_seconds = max(self.gap_seconds, min(clock - _TICK_SECONDS, computed))


def serve_until_told(port: int, gap_seconds: Callable[[], float], begin: Callable[[], None]) -> None:
    """Print the port; then each line of standard input, `begin` or `end`, begins an attack or ends it."""
    sys.stdout.write(f"{port}\n")
    sys.stdout.flush()
    before = 0.0
    for line in sys.stdin:
        if line.strip() == "begin":
            _forget_peak()
            begin()
            before = _mib("VmRSS")
            reply = "{}"
        else:
            reply = json.dumps(asdict(Measured(1000 * gap_seconds(), before, _mib("VmHWM"))))
        sys.stdout.write(f"{reply}\n")
        sys.stdout.flush()


def _forget_peak() -> None:
    # 5 sets the peak of resident memory to its present size.
    Path("/proc/self/clear_refs").write_text("5")


def _mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) / 1024
