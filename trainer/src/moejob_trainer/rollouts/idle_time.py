"""The share of time in which engines have nothing to compute. Pure: callers read the clock.

An engine is idle without a request in flight, and while it is paused or asleep. An engine that is lost has no request
in flight, so it is idle, too. Example: of two engines over 10 s, one answered for 8 s and the other was lost; the share
is (0.2 + 1) / 2 = 0.6.
"""

from __future__ import annotations

from collections.abc import Iterable


class IdleClock:
    """The idle seconds of one engine since they were last taken."""

    def __init__(self, now: float) -> None:
        self._is_busy = False
        self._changed_at = self._taken_at = now
        self._idle_seconds = 0.0

    def set_busy(self, now: float, *, is_busy: bool) -> None:
        """Note whether the engine has something to compute from now on."""
        self._add_idle_seconds(now)
        self._is_busy = is_busy

    def take_share(self, now: float) -> float:
        """Return the idle share of the time since the last call, or since the clock was made; 0 for no time."""
        self._add_idle_seconds(now)
        seconds, idle_seconds = now - self._taken_at, self._idle_seconds
        self._taken_at, self._idle_seconds = now, 0.0
        return idle_seconds / seconds if seconds > 0 else 0.0

    def _add_idle_seconds(self, now: float) -> None:
        if not self._is_busy:
            self._idle_seconds += now - self._changed_at
        self._changed_at = now


def mean_idle_share(clocks: Iterable[IdleClock], now: float) -> float:
    """Return the mean of all engines' shares since the last call."""
    shares = [clock.take_share(now) for clock in clocks]
    return sum(shares) / len(shares)
