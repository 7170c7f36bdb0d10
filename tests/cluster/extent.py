"""The extent of faults: `MOEJOB_FAULTS=full` asks for everything, as `make test-faults` does."""

from __future__ import annotations

import os

import pytest

IS_FULL = os.environ.get("MOEJOB_FAULTS") == "full"
in_full = pytest.mark.skipif(not IS_FULL, reason="make test-faults does this")

# Two minutes to build, and what it does is kube-router's own.
IS_WITH_KUBE_ROUTER = os.environ.get("MOEJOB_POLICY_ENGINE") == "kube-router"
with_kube_router = pytest.mark.skipif(not IS_WITH_KUBE_ROUTER, reason="make test-policies does this")
