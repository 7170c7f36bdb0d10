"""A job's NetworkPolicy as an engine understands it that people run, and not only the filters of these tests."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path

import pytest

from cluster.extent import with_kube_router
from cluster.nodes.cluster import Cluster
from cluster.nodes.kube_router import enforce_with_kube_router
from cluster.nodes.pods import Pods, Shell
from cluster.nodes.strangers import await_address
from cluster.nodes.test_policies import MEMBER_PORTS, grpo, other_pods, reached_ports
from cluster.nodes.training import SubmittedJob
from cluster.waiting import until

__all__ = ["grpo", "other_pods"]
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


def kept_out(space: Pods, name: str, hosts: Iterable[str]) -> None:
    """Wait for an engine that has just learned of pods."""
    until(lambda: reached_ports(space, name, *hosts) == set(), waiting_for=f"{name} to be kept out")
