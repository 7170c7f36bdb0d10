"""Lines of the log that are for the user, beside the launcher's own."""

from __future__ import annotations

import sys


def to_stderr(line: str) -> None:
    """Write a line that is for the user."""
    sys.stderr.write(f"{line}\n")
