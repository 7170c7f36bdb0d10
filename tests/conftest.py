"""Owns how every test runs. HYPOTHESIS_PROFILE=explore looks where the reproducible profile never does."""

from __future__ import annotations

import gc
import os
from importlib.util import find_spec

import pytest

# On a machine with a GPU there may be no more than torch and pytest: tests/gpu asks for nothing else.
if find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile("ci", derandomize=True, deadline=None, database=None, print_blob=True)
    settings.register_profile("explore", max_examples=5000, deadline=None, print_blob=True)
    settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "ci"))

# Looking for garbage is a fifth of what imports cost, and what they bring stays. Tests that count bytes look for it
# often, and forked processes would copy every page in which they look.
gc.disable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop() -> None:
    """Look for garbage from here on, among what tests make."""
    gc.freeze()
    gc.enable()
