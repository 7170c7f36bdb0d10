"""Exit codes of the command line."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What the caller of a command learns from its exit code."""

    ACCEPTED = 0
    REFUSED = 1
    UNREADABLE = 2
    INTERNAL = 70
    INTERRUPTED = 130
