"""Exit codes of the command line."""

from __future__ import annotations

from enum import IntEnum


class CommandExit(IntEnum):
    """The exit codes of commands."""

    ACCEPTED = 0
    REFUSED = 1
    UNREADABLE = 2
    NOT_FOUND = 3
    DENIED = 4
    UNREACHABLE = 5
    INTERNAL = 70
    INTERRUPTED = 130
