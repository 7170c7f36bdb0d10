"""The filters that enforce NetworkPolicies on the nodes: what follows from a policy, and that packets obey."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from builders import merge_sections
from cluster.control_plane.releases import Release
from cluster.extent import in_full
from cluster.nodes.cluster import Cluster, shell_image
from cluster.nodes.node import Programs
from cluster.nodes.pods import Pods, Shell
from cluster.nodes.policies import REFUSAL, ClusterView, PodAddress, UnknownPolicyError, build_filters, enforce_policies
from cluster.nodes.strangers import await_address
from cluster.nodes.training import JOBS, ROOT, SubmittedJob, submit_job
from cluster.waiting import until
from moejob_api.contract.pods import PodPort

OWN, OTHER = {"team": "own"}, {"team": "other"}
SEEN_PODS = (
    PodAddress("a", {"app": "rank"}, "10.0.0.1", {"http": 80}),
    PodAddress("a", {"app": "rank"}, "10.0.0.2", {"http": 81}),
    PodAddress("a", {"app": "web"}, "10.0.0.3", {}),
    PodAddress("b", {"app": "rank"}, "10.0.1.1", {}),
)


def summarise_rules(**spec: Any) -> list[str]:
    """The rules for pods, in short, that follow from one policy for the ranks of namespace a."""
    selected = {"podSelector": {"matchLabels": {"app": "rank"}}, "policyTypes": ["Ingress"]}
    policy = {"metadata": {"name": "p", "namespace": "a"}, "spec": selected | spec}
    found = build_filters(ClusterView([policy], SEEN_PODS, {"a": OWN, "b": OTHER})).splitlines()
    return [line.strip().removeprefix("ip daddr ") for line in found if "ip daddr" in line]


CLOSED = f"{{ 10.0.0.1, 10.0.0.2 }} {REFUSAL}"
TO_RANKS = {"podSelector": {"matchLabels": {"app": "rank"}}}


@pytest.mark.parametrize(
    ("ingress", "expected"),
    [
        pytest.param([], [], id="nothing comes in"),
        pytest.param([{}], ["10.0.0.1 accept", "10.0.0.2 accept"], id="all comes in"),
        pytest.param(
            [{"from": [TO_RANKS]}],
            [f"{to} ip saddr {{ 10.0.0.1, 10.0.0.2 }} accept" for to in ("10.0.0.1", "10.0.0.2")],
            id="pods of the same namespace",
        ),
        pytest.param(
            [{"from": [TO_RANKS | {"namespaceSelector": {"matchLabels": OTHER}}]}],
            [f"{to} ip saddr {{ 10.0.1.1 }} accept" for to in ("10.0.0.1", "10.0.0.2")],
            id="pods of another namespace",
        ),
        pytest.param([{"from": [{"podSelector": {"matchLabels": {"app": "none"}}}]}], [], id="pods that are not there"),
        pytest.param(
            [{"ports": [{"port": 9400, "protocol": "TCP"}]}],
            ["10.0.0.1 tcp dport 9400 accept", "10.0.0.2 tcp dport 9400 accept"],
            id="a port",
        ),
        pytest.param(
            [{"ports": [{"port": "http"}]}],
            ["10.0.0.1 tcp dport 80 accept", "10.0.0.2 tcp dport 81 accept"],
            id="a port by its name",
        ),
    ],
)
def test_filters_follow_from_a_policy(ingress: list[Any], expected: list[str]) -> None:
    assert summarise_rules(ingress=ingress) == [*expected, CLOSED]


@pytest.mark.parametrize(
    "spec",
    [
        pytest.param({"policyTypes": ["Egress"]}, id="egress"),
        pytest.param({"ingress": [{"from": [{"ipBlock": {"cidr": "10.0.0.0/8"}}]}]}, id="addresses"),
        pytest.param({"ingress": [{"ports": [{"port": 1, "endPort": 9}]}]}, id="a range of ports"),
        pytest.param({"podSelector": {"matchExpressions": [{"key": "a", "operator": "Exists"}]}}, id="an expression"),
    ],
)
def test_what_is_not_enforced_is_an_error(spec: dict[str, Any]) -> None:
    with pytest.raises(UnknownPolicyError):
        summarise_rules(**spec)


def test_without_a_policy_all_are_reached() -> None:
    assert "daddr" not in build_filters(ClusterView((), SEEN_PODS, {}))


# --- on the nodes -----------------------------------------------------------------------------------------------------

# Stands in for trainer and engine: answers on the ports of both, and is ready.
MEMBER = "moejob.test/member:1"
CONTROL = 40_123
MEMBER_PORTS = (PodPort.PROGRESS.value, PodPort.RENDEZVOUS.value, PodPort.RANKS.value, PodPort.ROLLOUT.value, CONTROL)
_LISTEN = f"for port in {' '.join(map(str, MEMBER_PORTS))}; do httpd -p $port -h /tmp; done"
ANSWERS = f"echo >/tmp/ready; {_LISTEN}; trap exit TERM; while :; do sleep 0.2; done"
# Its model comes along.
STANDING_IN: dict[str, Any] = {
    "model": {"source": "moejob/tiny-moe"},
    "resources": {"image": MEMBER, "rolloutImage": MEMBER},
}


@pytest.fixture
def other_pods(nodes: Cluster) -> Iterator[Pods]:
    """Those of another namespace."""
    name = nodes.plane.api.create("/api/v1/namespaces", {"metadata": {"generateName": "other-"}})["metadata"]["name"]
    until(lambda: nodes.plane.has_service_account(name), waiting_for=f"a service account in {name}")
    yield Pods(nodes.plane, name)
    nodes.plane.api.delete(f"/api/v1/namespaces/{name}")


@pytest.fixture
def grpo(
    nodes: Cluster, home: Release, namespace: str, node_programs: Programs, tmp_path: Path
) -> Iterator[SubmittedJob]:
    """A trainer and an engine, as the operator makes them."""
    del home
    nodes.load_images({MEMBER: shell_image(tmp_path / "member.tar", node_programs, ANSWERS, user="65532")})
    body = yaml.safe_load((ROOT / "examples" / "tiny-grpo.yaml").read_text())
    job = submit_job(nodes, namespace, body | {"spec": merge_sections(body["spec"], STANDING_IN)})
    until(lambda: job.phase == "Running", waiting_for=job.describe)
    yield job
    # Or the operator would make the pods again that the end of a test waits for.
    nodes.plane.api.delete(f"{JOBS.format(namespace)}/{job.name}")


@pytest.mark.cluster
@pytest.mark.slow
@in_full
def test_an_engine_is_reached_by_its_trainer_and_by_no_stranger(
    nodes: Cluster, pods: Pods, grpo: SubmittedJob, other_pods: Pods
) -> None:
    members = [
        pod["metadata"]["name"] for pod in pods.plane.api.get(f"/api/v1/namespaces/{pods.namespace}/pods")["items"]
    ]
    trainer, engine = sorted(members, reverse=True)
    hosts = {name: await_address(nodes, grpo.namespace, name) for name in (trainer, engine)}
    for space in (pods, other_pods):
        space.run("stranger", Shell("sleep 3600"))
    marks = pods.plane.api.get(f"/api/v1/namespaces/{pods.namespace}/pods/{engine}")["metadata"]["labels"]
    pods.run("namesake", Shell("sleep 3600", labels=marks))
    with enforce_policies(nodes):
        # By its labels it is one of the job's: what these ports then ask for is not the policy's.
        assert reached_ports(pods, "namesake", hosts[engine]) == set(MEMBER_PORTS)
        assert reached_ports(pods, trainer, hosts[engine]) == set(MEMBER_PORTS)
        assert reached_ports(pods, engine, hosts[trainer]) == set(MEMBER_PORTS)
        for space in (pods, other_pods):
            assert reached_ports(space, "stranger", *hosts.values()) == set()
    assert reached_ports(other_pods, "stranger", hosts[engine]) == set(MEMBER_PORTS), (
        "it was the policy that kept it out"
    )


def reached_ports(pods: Pods, origin: str, *hosts: str, ports: Sequence[int] = MEMBER_PORTS) -> set[int]:
    """The ports that a pod reaches of any of these addresses."""
    tries = " ".join(f"nc -w 5 {host} {port} </dev/null && echo {port};" for host in hosts for port in ports)
    return {int(line) for line in pods.exec(origin, f"{tries} true").split()}
