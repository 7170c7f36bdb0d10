"""Shared parts of the tests of this folder: the programs, one control plane for all, a namespace for each."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from cluster.binaries import MissingProgramError, find_or_build
from cluster.control_plane.plane import PROGRAMS, ControlPlane
from cluster.control_plane.plane import control_plane as running_control_plane
from cluster.waiting import until

FAKE_NODES = 2
# Programs of a cluster look for garbage for a tenth of their time, and there is room for it.
os.environ.setdefault("GOGC", "400")


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> Mapping[str, Path]:
    """Return where the programs of a control plane are. The first run builds them, for minutes, and says so."""
    capturing = request.config.pluginmanager.getplugin("capturemanager")
    try:
        with capturing.global_and_fixture_disabled():
            return find_or_build(PROGRAMS, lambda line: print(line, file=sys.stderr, flush=True))  # noqa: T201
    except MissingProgramError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def control_plane(programs: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    """One control plane with two fake nodes of 8 GPUs each for the whole run."""
    with running_control_plane(tmp_path_factory.mktemp("control-plane"), programs, FAKE_NODES) as plane:
        yield plane


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """A namespace for one test. Its pods are gone when the next test starts, the rest of it a little later."""
    control_plane.expect_running()
    created = control_plane.api.create("/api/v1/namespaces", {"metadata": {"generateName": "test-"}})
    name: str = created["metadata"]["name"]
    # After a loss of the API server the controller manager takes its time to come back.
    until(lambda: control_plane.has_service_account(name), waiting_for=f"a service account in {name}")
    yield name
    pods = f"/api/v1/namespaces/{name}/pods"
    control_plane.api.delete(pods)
    until(lambda: not control_plane.api.get(pods)["items"], waiting_for=f"the end of the pods of {name}")
    control_plane.api.delete(f"/api/v1/namespaces/{name}")
