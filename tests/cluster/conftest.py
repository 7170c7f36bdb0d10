"""Shared parts of the tests of this folder: the programs, one control plane for all, a namespace for each."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from xdist.remote import Producer
from xdist.scheduler import LoadScopeScheduling

from cluster.binaries import MissingProgramError, found_or_built
from cluster.control_plane.plane import PROGRAMS, ControlPlane
from cluster.control_plane.plane import control_plane as running_control_plane
from cluster.waiting import until

FAKE_NODES = 2
NODES = Path(__file__).parent / "nodes"


class ByMachine(LoadScopeScheduling):  # type: ignore[misc]
    """A file at a time for each process, but all that needs the nodes is one's: a machine has one set of them.

    Not `--dist loadgroup`: what xdist 3.8 adds to the name of a test for that, pytest 9.2 does not hear.
    """

    def _split_scope(self, nodeid: str) -> str:
        file = Path(nodeid.partition("::")[0])
        return NODES.name if NODES.name in file.parts else str(file)


def pytest_xdist_make_scheduler(config: pytest.Config, log: Producer) -> ByMachine:
    """Return how processes share the tests."""
    return ByMachine(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Return what takes longest begins."""
    items.sort(key=lambda item: NODES not in item.path.parents)


@pytest.fixture(scope="session")
def programs(request: pytest.FixtureRequest) -> Mapping[str, Path]:
    """Return where the programs of a control plane are. The first run builds them, for minutes, and says so."""
    capturing = request.config.pluginmanager.getplugin("capturemanager")
    try:
        with capturing.global_and_fixture_disabled():
            return found_or_built(PROGRAMS, lambda line: print(line, file=sys.stderr, flush=True))  # noqa: T201
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
