"""The share of a long work for the user of a command: a bar on a terminal, a line every ten seconds elsewhere.

The command line reads the output of the program that does the work, and quotes it when the work fails. So the share has
a way of its own: a descriptor of the command's standard error, which the command passes on.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

from moejob_trainer.runtime.heartbeats import ShareReport, ignore_share

LINE_SECONDS = 10.0
_BAR_SECONDS, _BAR_WIDTH = 0.1, 40


def open_share_display(work: str, descriptor: int | None) -> ShareReport:
    """Return what shows the shares of a work on a descriptor; without one, nothing does."""
    if descriptor is None:
        return ignore_share
    return ShareDisplay(work, os.fdopen(descriptor, "w", closefd=False))


@dataclass(slots=True)
class ShareDisplay:
    """Draws each share that it is given, not too often."""

    work: str
    stream: TextIO
    clock: Callable[[], float] = time.monotonic
    _shown_at: float = field(init=False)

    def __post_init__(self) -> None:
        # A work of a few seconds needs no line.
        self._shown_at = self.clock()

    def __call__(self, done: int, total: int) -> None:
        """Show how much is done, of how much."""
        is_terminal, now = self.stream.isatty(), self.clock()
        is_end = is_terminal and done >= total
        if total <= 0 or (not is_end and now - self._shown_at < (_BAR_SECONDS if is_terminal else LINE_SECONDS)):
            return
        self._shown_at = now
        percentage = 100 * min(done, total) // total
        if not is_terminal:
            self.stream.write(f"{self.work}: {percentage} %\n")
        else:
            filled = "#" * (percentage * _BAR_WIDTH // 100)
            self.stream.write(f"\r{self.work} [{filled:<{_BAR_WIDTH}}] {percentage:3} %" + ("\n" if is_end else ""))
        self.stream.flush()
