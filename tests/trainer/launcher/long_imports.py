"""A module that computes for some seconds while it is imported."""

from __future__ import annotations

import time

_until = time.monotonic() + 6.0
while time.monotonic() < _until:
    pass
