"""The Secret and the policy of a job's pods, which the operator may create and not see: when it creates them again."""

from __future__ import annotations

from collections.abc import Callable
from ipaddress import ip_address, ip_network
from typing import Any

import pytest

from fake_world import World
from moejob_api.contract.pods import PodRole
from moejob_operator.actions import WRITE_ONLY, Kind
from moejob_operator.children.attempt import JobNetwork

ACCESS = "job-uid-1"
# Two engines beside the gang.
SEPARATE = {
    "rewards": [{"name": "math"}],
    "maxNewTokens": 256,
    "promptsPerStep": 2,
    "rollout": {"placement": "Separate", "replicas": 2},
}
NO_SECRET = {"reason": "CreateContainerConfigError", "message": f'secret "{ACCESS}" not found'}


def running() -> World:
    """A job of two pods that run, in a cluster where the operator makes policies."""
    world = World(network=JobNetwork("moejob-system"))
    world.apply()
    world.settle()
    world.run()
    world.settle()
    assert created(world) == (1, 1)
    return world


def test_the_policy_bounds_connections_of_pods_only_where_that_is_asked() -> None:
    [policy] = policies(JobNetwork("moejob-system"))
    assert policy["spec"]["policyTypes"] == ["Ingress"]
    assert "egress" not in policy["spec"]


def test_pods_may_connect_to_each_other_to_dns_and_to_port_443_but_of_no_machine_s_credentials() -> None:
    store = {"to": [{"podSelector": {"matchLabels": {"app": "minio"}}}], "ports": [{"port": 9000}]}
    [policy] = policies(JobNetwork("moejob-system", bounds_egress=True, egress_rules=(store,)))
    assert policy["spec"]["policyTypes"] == ["Ingress", "Egress"]
    own, names, web, further = policy["spec"]["egress"]
    assert own == {"to": [{"podSelector": policy["spec"]["podSelector"]}]}
    assert {port["port"] for port in names["ports"]} == {53}
    assert (web["ports"], further) == ([{"port": 443, "protocol": "TCP"}], store)
    for address in ("169.254.169.254", "168.63.129.16", "100.100.100.200", "fd00:ec2::254", "fd20:ce::254"):
        assert not is_allowed(web, address), address
    for address in ("93.184.216.34", "10.0.0.1", "2606:2800:220:1::1"):
        assert is_allowed(web, address), address


def policies(network: JobNetwork) -> list[Any]:
    """The policies of a job under an operator with such a network."""
    world = World(network=network)
    world.apply()
    world.settle()
    return [body for (kind, _, _), body in world.cluster.objects.items() if kind is Kind.NETWORK_POLICY]


def is_allowed(rule: Any, text: str) -> bool:
    """Return whether a rule lets connections to an address out."""
    address = ip_address(text)
    blocks = [peer["ipBlock"] for peer in rule["to"]]
    return any(
        address in ip_network(block["cidr"]) and not any(address in ip_network(each) for each in block["except"])
        for block in blocks
    )


def running_with_engines() -> World:
    """A job of GRPO with pods for its engines, all of which run."""
    world = World(network=JobNetwork("moejob-system"))
    world.apply(method="GRPO", grpo=SEPARATE)
    world.settle()
    world.run()
    world.settle()
    return world


def created(world: World) -> tuple[int, int]:
    """Return how often creation was asked for, of the Secret and of the policy."""
    secret, policy = (world.cluster.log.count(f"create {kind} {ACCESS}") for kind in (Kind.SECRET, Kind.NETWORK_POLICY))
    return secret, policy


def delete_access(world: World) -> None:
    """Another client deletes both."""
    for kind in WRITE_ONLY:
        world.cluster.remove_object((kind, "team", ACCESS))


def created_since_secret(world: World) -> list[str]:
    """Return what pods were created and deleted since the Secret was made last, by what was done."""
    made = max(at for at, line in enumerate(world.cluster.log) if line == f"create {Kind.SECRET} {ACCESS}")
    done = (" ".join(line.split()[:2]) for line in world.cluster.log[made:])
    return [line for line in done if line in ("create Pod", "delete Pod")]


def exists(world: World) -> bool:
    return all((kind, "team", ACCESS) in world.cluster.objects for kind in WRITE_ONLY)


def test_they_are_created_once_for_all_pods_of_an_attempt() -> None:
    world = running()
    world.end_pod(1, 137)
    world.settle()
    assert (world.pod_names(), created(world)) == (["0-0", "0-1"], (1, 1))


def test_a_quota_that_denies_pods_for_long_does_not_repeat_them() -> None:
    world = World(network=JobNetwork("moejob-system"))
    world.cluster.deny_pods("exceeded quota: gpus")
    world.apply()
    for _ in range(5):
        world.settle()
        world.wait(31)
    assert (world.pod_names(), created(world)) == ([], (1, 1))


@pytest.mark.parametrize(
    "happens",
    [
        pytest.param(lambda world: world.end_all_pods(137), id="a new gang"),
        pytest.param(
            lambda world: (world.restart_operator(), world.end_pod(1, 137)), id="another process of the operator"
        ),
    ],
)
def test_what_another_client_deleted_is_there_again_before_the_next_pods(happens: Callable[[World], object]) -> None:
    world = running()
    delete_access(world)
    happens(world)
    world.settle()
    assert (len(world.pod_names()), created(world), exists(world)) == (2, (2, 2), True)
    names = [line for line in world.cluster.log if ACCESS in line or "create Pod" in line]
    assert "create Pod" in names[-1], "a pod may not run before what guards it is there"


def test_a_secret_that_a_kubelet_misses_is_created_again_while_no_pod_has_started() -> None:
    world = World(network=JobNetwork("moejob-system"))
    world.apply()
    world.settle()
    delete_access(world)
    for index in (0, 1):
        world.hold_pod(index, waiting=NO_SECRET)
    world.settle()
    assert (world.pod_names(), created(world), exists(world)) == (["0-0", "0-1"], (2, 2), True)
    world.run()
    world.settle()
    world.reconcile()
    assert created(world) == (2, 2)


def test_a_secret_that_is_lost_while_pods_run_replaces_the_gang_and_says_why() -> None:
    """Made again it has another value, by which the pods that run would turn the new one away."""
    world = running()
    delete_access(world)
    world.end_pod(1, 137)
    world.settle()
    assert (world.pod_names(), exists(world)) == (["0-0", "0-1"], False), "nothing shows it before a kubelet says so"
    spent = world.status.restarts.since_checkpoint
    world.hold_pod(1, waiting=NO_SECRET)
    world.settle()
    assert (world.pod_names(), created(world), exists(world)) == (["1-0", "1-1"], (2, 2), True)
    assert created_since_secret(world) == ["create Pod", "create Pod"], "all of the next gang get one value"
    failure = world.status.last_failure
    assert failure is not None
    assert (failure.reason, ACCESS in failure.message) == ("SecretLost", True)
    assert world.status.restarts.since_checkpoint == spent, "the job did nothing wrong"
    said = [event.message for event in world.cluster.events if event.reason == "GangRestarted"]
    assert [ACCESS in message for message in said] == [True]
    world.run()
    world.settle()
    assert (world.status.phase, created(world)) == ("Running", (2, 2))


def test_engines_that_know_the_value_of_a_lost_secret_are_replaced_before_it_is_made_again() -> None:
    world = running_with_engines()
    before = {pod["metadata"]["uid"] for pod in world.cluster.pods()}
    delete_access(world)
    world.delete_pod(1)
    world.settle()
    world.hold_pod(1, waiting=NO_SECRET)
    world.settle()
    assert not before & {pod["metadata"]["uid"] for pod in world.cluster.pods()}
    assert created_since_secret(world) == 4 * ["create Pod"], "two engines, and the next gang"


def test_engines_are_replaced_with_a_gang_that_is_replaced_for_another_reason_than_the_lost_secret() -> None:
    """The next gang gets another value, and no kubelet misses the one before."""
    world = running_with_engines()
    before = {pod["metadata"]["uid"] for pod in world.cluster.pods()}
    delete_access(world)
    world.end_all_pods(137)
    world.settle()
    assert not before & {pod["metadata"]["uid"] for pod in world.cluster.pods()}
    assert created_since_secret(world) == 4 * ["create Pod"]


def test_engines_outlive_a_gang_whose_secret_is_there() -> None:
    world = running_with_engines()
    engines = {pod["metadata"]["uid"] for pod in world.cluster.pods(PodRole.ROLLOUT)}
    world.end_all_pods(137)
    world.settle()
    assert {pod["metadata"]["uid"] for pod in world.cluster.pods(PodRole.ROLLOUT)} == engines


@pytest.mark.parametrize(
    "sections",
    [
        pytest.param({}, id="a pod of the gang"),
        pytest.param({"method": "GRPO", "grpo": SEPARATE}, id="beside engines"),
    ],
)
def test_another_process_of_the_operator_mixes_no_values_either(sections: dict[str, Any]) -> None:
    """It has created nothing yet, and would create the Secret with the first pod that it replaces."""
    world = World(network=JobNetwork("moejob-system"))
    world.apply(**sections)
    world.settle()
    world.run()
    world.settle()
    before = {pod["metadata"]["uid"] for pod in world.cluster.pods()}
    delete_access(world)
    world.restart_operator()
    world.end_pod(1, 137)
    world.settle()
    assert not before & {pod["metadata"]["uid"] for pod in world.cluster.pods()}
    assert set(created_since_secret(world)) == {"create Pod"}


def test_an_engine_that_another_process_replaces_mixes_no_values() -> None:
    world = running_with_engines()
    before = {pod["metadata"]["uid"] for pod in world.cluster.pods()}
    delete_access(world)
    world.restart_operator()
    world.delete_pod(0, PodRole.ROLLOUT)
    world.settle()
    assert not before & {pod["metadata"]["uid"] for pod in world.cluster.pods()}
    assert set(created_since_secret(world)) == {"create Pod"}


def test_another_secret_that_a_kubelet_misses_is_the_users() -> None:
    world = running()
    world.end_pod(1, 137)
    world.settle()
    world.hold_pod(1, waiting={**NO_SECRET, "message": 'secret "hugging-face" not found'})
    world.settle()
    assert created(world) == (1, 1)


def test_a_job_that_is_gone_takes_what_is_remembered_of_it_along() -> None:
    world = running()
    assert len(world.access) == 1
    world.delete_job()
    world.reconcile()
    assert len(world.access) == 0
    world.apply()
    world.settle()
    assert sum(line.startswith("create Secret") for line in world.cluster.log) == 2
