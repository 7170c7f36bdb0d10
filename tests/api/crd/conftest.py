"""Owns the one API server that the tests of the CRD ask."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest

from api_server import ApiServer, find_or_build_server


@pytest.fixture(scope="session")
def api_server() -> Iterator[ApiServer]:
    """The API server's own code around our CRD."""
    if shutil.which("go") is None:
        pytest.skip("go is not on PATH: the API server's own code cannot be built")
    with ApiServer(find_or_build_server()) as server:
        yield server
