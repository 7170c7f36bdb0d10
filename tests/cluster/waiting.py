"""Waiting for what other processes do: a condition, a deadline, and what to say when it has passed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

POLL_SECONDS = 0.05
# Only what fails waits as long; a busy machine is no failure.
LONGEST_SECONDS = 300.0

Seen = TypeVar("Seen")


class TooLateError(AssertionError):
    """A condition did not hold in time."""


def until(
    condition: Callable[[], Seen], *, waiting_for: str | Callable[[], str], seconds: float = LONGEST_SECONDS
) -> Seen:
    """Return what the condition returns, as soon as that is true."""
    deadline = time.monotonic() + seconds
    while not (seen := condition()):
        if time.monotonic() > deadline:
            said = waiting_for if isinstance(waiting_for, str) else waiting_for()
            raise TooLateError(f"not within {seconds:g} s: {said}")
        time.sleep(POLL_SECONDS)
    return seen
