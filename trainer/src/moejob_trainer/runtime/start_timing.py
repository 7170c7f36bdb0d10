"""Durations of a start of all ranks: launchers pass their part on to their ranks, ranks add theirs.

After a failure the first line of the step log shows with this where the time went. Durations only, measured by the
clock that processes of one machine share: clocks of two machines are never compared.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

# Durations of the launcher's part of a start, as JSON; it sets this for its ranks.
START = "MOEJOB_START"


_START_TICKS = 19


def process_began_at() -> float:
    """Return when the kernel started this process, on the monotonic clock: before anything was imported."""
    fields = Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    age_seconds = time.clock_gettime(time.CLOCK_BOOTTIME) - int(fields[_START_TICKS]) / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age_seconds


@dataclass(frozen=True, slots=True)
class LauncherTiming:
    """The launcher's part. In its first round it imports; in later ones it ends the round before."""

    ending_seconds: float
    import_seconds: float
    # Until the launchers of all pods were there.
    rendezvous_seconds: float
    # On the machine's monotonic clock.
    met_at: float

    def as_text(self) -> str:
        """For an environment."""
        return json.dumps(asdict(self))


@dataclass(frozen=True, slots=True)
class StartTiming:
    """One rank's way to its first step. Joining covers the process groups, loading all that follows."""

    ending_seconds: float
    import_seconds: float
    rendezvous_seconds: float
    joining_seconds: float
    loading_seconds: float

    def as_fields(self) -> dict[str, float]:
        """As the step log names it."""
        return {
            "endingSeconds": round(self.ending_seconds, 3),
            "importSeconds": round(self.import_seconds, 3),
            "meetingSeconds": round(self.rendezvous_seconds, 3),
            "joiningSeconds": round(self.joining_seconds, 3),
            "loadingSeconds": round(self.loading_seconds, 3),
        }


class StartTimer:
    """Timer of one rank's start. Without a launcher's timing there is no result."""

    def __init__(self, timing: LauncherTiming | None, clock: Callable[[], float] = time.monotonic) -> None:
        self._timing, self._clock = timing, clock
        self._joined_at = 0.0

    @classmethod
    def for_rank(cls, environ: Mapping[str, str] = os.environ) -> StartTimer:
        """Return the timer of this process."""
        text = environ.get(START)
        return cls(None if text is None else LauncherTiming(**json.loads(text)))

    def mark_joined(self) -> None:
        """The process groups are there."""
        self._joined_at = self._clock()

    def finish_start(self) -> StartTiming | None:
        """The state is there and the first step begins."""
        timing, now = self._timing, self._clock()
        if timing is None:
            return None
        return StartTiming(
            timing.ending_seconds,
            timing.import_seconds,
            timing.rendezvous_seconds,
            joining_seconds=self._joined_at - timing.met_at,
            loading_seconds=now - self._joined_at,
        )


def slowest_start(starts: Sequence[StartTiming]) -> StartTiming | None:
    """Return the start of all ranks: the longest of each part, but the shortest wait at the rendezvous."""
    if not starts:
        return None
    return StartTiming(
        max(start.ending_seconds for start in starts),
        max(start.import_seconds for start in starts),
        min(start.rendezvous_seconds for start in starts),
        max(start.joining_seconds for start in starts),
        max(start.loading_seconds for start in starts),
    )
