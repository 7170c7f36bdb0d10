"""Strangers beside a job that trains on two real nodes: two pods of its namespace, and one of another.

First the nodes enforce NetworkPolicies. Then none does, and what strangers still cannot do is the merit of the secret.
So it is from the first for the pod of the same namespace that has all labels of one of the gang, for by these the
policy lets pods in.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import pytest

from cluster.control_plane.releases import Release
from cluster.extent import in_full
from cluster.nodes.cluster import Cluster
from cluster.nodes.policies import enforce_policies
from cluster.nodes.strangers import ProbePod, Try, await_address, listening_ports, make_namespace, start_stranger
from cluster.nodes.training import JOBS, VERSION, SubmittedJob, over_two_nodes, read_example, submit_job
from cluster.waiting import until
from moejob_api.contract.pods import Label, PodPort

pytestmark = [pytest.mark.cluster, pytest.mark.slow, in_full]

IMAGE = f"moejob-trainer-cpu:{VERSION}"
# The job is deleted long before.
STEPS = 100_000
# An attempt that no job gets to.
FAR = 999_999_999
WHERE = ("same namespace", "another namespace")
NAMESAKE = "same namespace and labels"
# A packet filter says this. A port on which nothing listens says ECONNREFUSED.
FILTERED = "EHOSTUNREACH"
Tries = Mapping[Try, str]


@dataclass(frozen=True, slots=True)
class AttackResults:
    """The results of tries from beside a job: where policies are enforced, and where they are not."""

    listening: Mapping[str, Collection[int]]
    behind_policies: Mapping[str, Tries]
    # The operator's, and those of a pod of the gang.
    let_in: Mapping[str, Tries]
    turned_away: Mapping[str, Tries]
    # Names and UIDs of the gang, before and after.
    gang: tuple[Mapping[str, str], Mapping[str, str]]
    done: tuple[int, int]
    status: Any


@pytest.fixture(scope="module")
def attack_results(nodes: Cluster, home: Release) -> Iterator[AttackResults]:
    """All of it."""
    with make_namespace(nodes) as job_namespace, make_namespace(nodes) as other_namespace:
        with enforce_policies(nodes) as enforcer:
            job = submit_job(nodes, job_namespace, build_endless_job())
            strangers = {
                name: start_stranger(nodes, namespace, IMAGE, node)
                for name, namespace, node in zip(
                    WHERE, (job_namespace, other_namespace), ("node-1", "node-2"), strict=True
                )
            }
            until(lambda: job.run().last_step() > 0, waiting_for=job.describe)
            step_before, gang = job.run().last_step(), job.pod_uids()
            copied = job.list_pods()[0]["metadata"]["labels"]
            strangers[NAMESAKE] = start_stranger(nodes, job_namespace, IMAGE, "node-2", copied)
            enforcer.catch_up()
            hosts = {pod: await_address(nodes, job_namespace, pod) for pod in gang}
            listening = {pod: listening_ports(nodes, job_namespace, pod) for pod in gang}
            every = [("connect", hosts[pod], port) for pod, found in listening.items() for port in sorted(found)]
            behind_policies = {name: one.run_tries(every) for name, one in strangers.items()}
            known_ports = [
                ("connect", host, port.value)
                for host in hosts.values()
                for port in (PodPort.PROGRESS, PodPort.RENDEZVOUS)
            ]
            inside = {"operator": find_operator_pod(home), "gang": ProbePod(nodes.plane, job_namespace, min(gang))}
            let_in = {name: one.run_tries(known_ports) for name, one in inside.items()}
        attacks = [
            ("end_the_job", hosts[min(gang)], PodPort.RENDEZVOUS.value),
            ("guess", hosts[min(gang)], PodPort.RENDEZVOUS.value),
            ("post", hosts[min(gang)], PodPort.PROGRESS.value),
            ("connect", hosts[min(gang)], PodPort.RANKS.value),
        ]
        turned_away = {name: one.run_tries(attacks) for name, one in strangers.items()}
        # Who looks for the gang by labels, as this test does, finds it too.
        nodes.plane.kubectl("delete", "pod", strangers[NAMESAKE].pod, f"--namespace={job_namespace}")
        forge_pod(job)
        last_step = job.run().last_step()
        until(lambda: job.run().last_step() > last_step, waiting_for=job.describe)
        status = job.read()["status"]
        yield AttackResults(
            listening,
            behind_policies,
            let_in,
            turned_away,
            (gang, job.pod_uids()),
            (step_before, job.run().last_step()),
            status,
        )
        nodes.plane.api.delete(f"{JOBS.format(job_namespace)}/{job.name}")


def build_endless_job() -> dict[str, Any]:
    """Two ranks on a node each."""
    job = over_two_nodes(read_example())
    job["spec"]["data"] |= {"maxLength": 64}
    job["spec"]["training"] |= {"maxSteps": STEPS, "evalEvery": None, "scheduler": {"kind": "Constant"}}
    job["spec"]["checkpoint"] = {"everySteps": STEPS, "exportHuggingFace": False}
    job["spec"]["storage"] = {"size": "2Gi"}
    return job


def find_operator_pod(home: Release) -> ProbePod:
    """A pod of the operator."""
    pods = home.get("pods?labelSelector=app.kubernetes.io/component=operator")["items"]
    return ProbePod(home.plane, home.namespace, pods[0]["metadata"]["name"])


def forge_pod(job: SubmittedJob) -> None:
    """Give a pod the marks of the gang and an attempt that never began; return when the operator has deleted it."""
    api, path = job.nodes.plane.api, f"/api/v1/namespaces/{job.namespace}/pods"
    metadata = job.list_pods()[0]["metadata"]
    name = f"{job.name}-trainer-{FAR}-00000"
    marks = {
        "labels": metadata["labels"] | {Label.ATTEMPT.value: str(FAR)},
        "ownerReferences": metadata["ownerReferences"],
    }
    # On no node: its end is then the operator's doing alone.
    spec = {"containers": [{"name": "main", "image": IMAGE}], "nodeSelector": {"kubernetes.io/hostname": "nowhere"}}
    api.create(path, {"metadata": {"name": name, **marks}, "spec": spec})
    until(lambda: name not in {pod["metadata"]["name"] for pod in api.get(path)["items"]}, waiting_for=job.describe)


@pytest.mark.parametrize("where", WHERE)
def test_a_stranger_reaches_no_port_of_a_job_where_policies_are_enforced(
    attack_results: AttackResults, where: str
) -> None:
    for pod, found in attack_results.listening.items():
        assert PodPort.PROGRESS in found, f"nothing listens in {pod}"
    # Those of the contract, and those that gloo has chosen.
    assert {port for found in attack_results.listening.values() for port in found} > {
        PodPort.PROGRESS,
        PodPort.RENDEZVOUS,
    }
    assert set(attack_results.behind_policies[where].values()) == {FILTERED}


def test_labels_of_a_gang_let_a_pod_through_its_policy(attack_results: AttackResults) -> None:
    """One who may create pods in a namespace may give them any labels, so a policy does not keep them out alone."""
    assert set(attack_results.behind_policies[NAMESAKE].values()) == {"open"}


def test_the_operator_reaches_what_a_job_says_of_itself_and_nothing_else(attack_results: AttackResults) -> None:
    said = {(port, answer) for (_, _, port), answer in attack_results.let_in["operator"].items()}
    assert said == {(PodPort.PROGRESS, "open"), (PodPort.RENDEZVOUS, FILTERED)}


def test_pods_of_a_gang_reach_each_other(attack_results: AttackResults) -> None:
    said = [answer for (_, _, port), answer in attack_results.let_in["gang"].items() if port == PodPort.PROGRESS]
    assert said == ["open", "open"]
    assert attack_results.status["restarts"]["ranks"] == 0


@pytest.mark.parametrize("where", [*WHERE, NAMESAKE])
def test_a_stranger_cannot_end_a_job_where_no_policy_is_enforced(attack_results: AttackResults, where: str) -> None:
    said = {verb: answer for (verb, _, _), answer in attack_results.turned_away[where].items()}
    # The launcher's nonce is all that a stranger gets.
    assert said["end_the_job"] == said["guess"] == "closed after 32 bytes"
    assert said["post"].split()[1] in ("404", "405", "501"), said["post"]
    # The store of the ranks is on the loopback of pod 0.
    assert said["connect"] == "ECONNREFUSED"


def test_the_gang_trains_through_it_all_and_a_pod_with_its_copied_marks_is_gone(attack_results: AttackResults) -> None:
    before, after = attack_results.gang
    assert before == after
    assert attack_results.done[0] < attack_results.done[1]
    assert attack_results.status["phase"] == "Running"
