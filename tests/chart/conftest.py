"""Owns Helm for tests that need no cluster."""

from __future__ import annotations

import sys

import pytest

from charts import Helm
from cluster.binaries import MissingProgramError, find_or_build


@pytest.fixture(scope="session")
def helm(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Helm in the pinned version. The first run builds it, for a minute, and says so."""
    capturing = request.config.pluginmanager.getplugin("capturemanager")
    try:
        with capturing.global_and_fixture_disabled():
            program = find_or_build(["helm"], lambda line: print(line, file=sys.stderr, flush=True))["helm"]  # noqa: T201
    except MissingProgramError as missing:
        pytest.skip(str(missing))
    return Helm(program, tmp_path_factory.mktemp("helm"))
