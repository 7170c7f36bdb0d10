"""The extent of faults: `MOEJOB_FAULTS=full` asks for everything, as `make test-faults` does."""

from __future__ import annotations

import os

import pytest

IS_FULL = os.environ.get("MOEJOB_FAULTS") == "full"
in_full = pytest.mark.skipif(not IS_FULL, reason="make test-faults does this")

# Images of engines take ten gigabytes each, and to build the same tree again takes minutes.
IS_WITH_ALL_IMAGES = os.environ.get("MOEJOB_IMAGES") == "all"
with_all_images = pytest.mark.skipif(not IS_WITH_ALL_IMAGES, reason="make test-images does this")

# Two minutes to build, and what it does is kube-router's own.
IS_WITH_KUBE_ROUTER = os.environ.get("MOEJOB_POLICY_ENGINE") == "kube-router"
with_kube_router = pytest.mark.skipif(not IS_WITH_KUBE_ROUTER, reason="make test-policies does this")
