"""Exit codes of the command line."""

from __future__ import annotations

from enum import IntEnum


class CommandExit(IntEnum):
    """The exit codes of commands."""

    ACCEPTED = 0
    REFUSED = 1
    UNREADABLE = 2
    INTERNAL = 70
    INTERRUPTED = 130
