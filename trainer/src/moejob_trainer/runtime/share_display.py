"""The share of a long work for the user of a command: a bar on a terminal, a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TextIO

LINE_SECONDS = 10.0
_BAR_SECONDS, _BAR_WIDTH = 0.1, 40


@dataclass(slots=True)
class ShareDisplay:
    """Draws each share that it is given, not too often. It writes to standard error: results are on standard output."""

    work: str
    stream: TextIO = field(default_factory=lambda: sys.stderr)
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
