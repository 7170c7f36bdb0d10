"""Fails as it loads."""

from __future__ import annotations

raise RuntimeError("broken on purpose")
