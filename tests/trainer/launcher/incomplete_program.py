"""A rank's program whose requirements are not installed."""

from __future__ import annotations

import importlib

importlib.import_module("a_requirement_that_is_not_installed")


def begin() -> int:
    """Is never reached."""
    return 0
