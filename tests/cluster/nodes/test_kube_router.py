"""A job's NetworkPolicy as an engine understands it that people run, and not only the filters of these tests."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from cluster.control_plane.releases import Release
from cluster.extent import with_kube_router
from cluster.nodes.cluster import Cluster
from cluster.nodes.kube_router import enforce_with_kube_router
from cluster.nodes.pods import Pods, Shell
from cluster.nodes.strangers import await_address
from cluster.nodes.test_policies import MEMBER_PORTS, grpo, other_pods, reached_ports
from cluster.nodes.test_tenants import upgrade_release
from cluster.nodes.training import VALUES, SubmittedJob
from cluster.waiting import until

__all__ = ["grpo", "other_pods"]
WEB, STORE, DNS = 443, 9000, 53
pytestmark = [pytest.mark.cluster, pytest.mark.slow, with_kube_router]


def test_kube_router_lets_pods_of_a_job_reach_each_other_and_no_stranger_reach_them(
    nodes: Cluster, pods: Pods, grpo: SubmittedJob, other_pods: Pods, tmp_path: Path
) -> None:
    listed = pods.plane.api.get(f"/api/v1/namespaces/{pods.namespace}/pods")["items"]
    trainer, engine = sorted((pod["metadata"]["name"] for pod in listed), reverse=True)
    hosts = {name: await_address(nodes, grpo.namespace, name) for name in (trainer, engine)}
    everything = set(MEMBER_PORTS)
    # On the node of the one and on another than that of the other, which a bridge and a route lead to.
    for space in (pods, other_pods):
        for node in nodes.nodes:
            space.run(f"stranger-{node}", Shell("sleep 3600", node=node))
    strangers = [(space, f"stranger-{node}") for space in (pods, other_pods) for node in nodes.nodes]
    for space, name in strangers:
        assert reached_ports(space, name, hosts[engine]) == everything
    with enforce_with_kube_router(nodes, tmp_path, lambda line: print(line, file=sys.stderr)):  # noqa: T201
        for space, name in strangers:
            kept_out(space, name, hosts.values())
        assert reached_ports(pods, trainer, hosts[engine]) == everything
        assert reached_ports(pods, engine, hosts[trainer]) == everything
        # Later pods, too: what the job is made of is replaced now and then.
        marks = pods.get(engine)["metadata"]["labels"]
        pods.run("namesake", Shell("sleep 3600", labels=marks))
        pods.run("late", Shell("sleep 3600"))
        until(lambda: reached_ports(pods, "namesake", hosts[engine]) == everything, waiting_for="a pod with its labels")
        kept_out(pods, "late", hosts.values())
    for space, name in strangers:
        assert reached_ports(space, name, hosts[engine]) == everything, "it was the policy that kept it out"


@pytest.fixture
def bounded_release(home: Release) -> Iterator[Release]:
    """The chart with one value more, which bounds connections of pods; afterwards without it again."""
    upgrade_release(home, VALUES | {"networkPolicy": {"jobsEgress": True}})
    yield home
    upgrade_release(home, VALUES)


@pytest.fixture
def metadata(nodes: Cluster, tmp_path: Path) -> Iterator[str]:
    """The address of credentials, as each machine of a cloud has it."""
    address = "169.254.169.254"
    serve = (sys.executable, "-m", "http.server", str(WEB), f"--bind={address}", f"--directory={tmp_path}")
    with ExitStack() as ending:
        for node in nodes.nodes.values():
            node.namespaces.run("ip", "address", "add", f"{address}/32", "dev", "lo")
            ending.callback(node.namespaces.run, "ip", "address", "delete", f"{address}/32", "dev", "lo")
            server = node.process("metadata", *serve)
            ending.callback(server.stop)
            server.start()
        yield address


def test_kube_router_lets_pods_of_a_job_out_to_each_other_to_dns_and_to_the_web_alone(
    bounded_release: Release, nodes: Cluster, pods: Pods, grpo: SubmittedJob, metadata: str, tmp_path: Path
) -> None:
    del bounded_release
    listed = pods.plane.api.get(f"/api/v1/namespaces/{pods.namespace}/pods")["items"]
    trainer, engine = sorted((pod["metadata"]["name"] for pod in listed), reverse=True)
    engine_host = await_address(nodes, grpo.namespace, engine)
    [dns] = {str(node.joins.dns) for node in nodes.nodes.values()}
    pods.run("outside", Shell(f"for port in {WEB} {STORE}; do httpd -p $port -h /; done; sleep 3600"))
    outside = await_address(nodes, pods.namespace, "outside")
    ways = {outside: (WEB, STORE), metadata: (WEB,), dns: (DNS,)}

    def reached_ways() -> dict[str, set[int]]:
        return {host: reached_ports(pods, trainer, host, ports=ports) for host, ports in ways.items()}

    open_ways = {outside: {WEB, STORE}, metadata: {WEB}, dns: {DNS}}
    until(lambda: reached_ways() == open_ways, waiting_for=lambda: f"{open_ways}, not {reached_ways()}", seconds=60)
    with enforce_with_kube_router(nodes, tmp_path, lambda line: print(line, file=sys.stderr)):  # noqa: T201
        bounded_ways = {outside: {WEB}, metadata: set(), dns: {DNS}}
        until(lambda: reached_ways() == bounded_ways, waiting_for=lambda: f"{bounded_ways}, not {reached_ways()}")
        assert reached_ports(pods, trainer, engine_host) == set(MEMBER_PORTS)
    until(lambda: reached_ways() == open_ways, waiting_for="the policy, which kept it in, to be gone")


def kept_out(space: Pods, name: str, hosts: Iterable[str]) -> None:
    """Wait for an engine that has just learned of pods."""
    until(lambda: reached_ports(space, name, *hosts) == set(), waiting_for=f"{name} to be kept out")
