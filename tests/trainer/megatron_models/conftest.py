"""Skips what needs Megatron-Bridge where it is not installed."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("megatron.bridge") else ["test_*.py"]
