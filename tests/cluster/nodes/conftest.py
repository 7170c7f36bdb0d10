"""One cluster of two real nodes and one release of the chart for all tests here, which are skipped without them."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from cluster.binaries import MissingProgramError
from cluster.control_plane.plane import ControlPlane
from cluster.control_plane.releases import Release
from cluster.nodes.cluster import Cluster, Settings, find_programs, run_cluster
from cluster.nodes.node import Programs
from cluster.nodes.obstacles import find_obstacles
from cluster.nodes.pods import Pods
from cluster.nodes.training import install_release
from images import CannotBuildError

# They wait for clocks of the cluster most of the time, and `make test` computes beside them; the last ones are alone.
WAITING = ("test_nodes.py", "test_faults.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put them first."""
    items.sort(key=lambda item: item.path.name not in WAITING)


@pytest.fixture(scope="session")
def node_programs(request: pytest.FixtureRequest) -> Programs:
    """Return where the programs of nodes are. The first run builds them, for minutes, and says so."""
    reasons = find_obstacles(Settings())
    if reasons:
        pytest.skip(f"no real nodes on this machine: {'; '.join(reasons)}")
    capturing = request.config.pluginmanager.getplugin("capturemanager")
    try:
        with capturing.global_and_fixture_disabled():
            return find_programs(lambda line: print(line, file=sys.stderr, flush=True))  # noqa: T201
    except MissingProgramError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def nodes(node_programs: Programs, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """The cluster."""
    with run_cluster(tmp_path_factory.mktemp("nodes"), node_programs) as running:
        yield running


@pytest.fixture(scope="session")
def home(nodes: Cluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    """Yield where the operator runs: the chart, with the images of this tree."""
    try:
        with install_release(nodes, tmp_path_factory.mktemp("release")) as made:
            yield made
    except CannotBuildError as missing:
        pytest.skip(str(missing))


@pytest.fixture(scope="session")
def control_plane(nodes: Cluster) -> ControlPlane:
    """That of the nodes: a namespace is one of theirs."""
    return nodes.plane


@pytest.fixture
def pods(nodes: Cluster, namespace: str) -> Pods:
    """The pods of a namespace of its own."""
    return Pods(nodes.plane, namespace)
