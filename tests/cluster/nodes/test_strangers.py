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
from cluster.nodes.policies import enforced
from cluster.nodes.strangers import Inside, Try, address, namespace_of, ports, stranger
from cluster.nodes.training import JOBS, VERSION, Submitted, example, over_two_nodes, submitted
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
class Siege:
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
def siege(nodes: Cluster, home: Release) -> Iterator[Siege]:
    """All of it."""
    with namespace_of(nodes) as own, namespace_of(nodes) as other:
        with enforced(nodes) as engine:
            job = submitted(nodes, own, endless())
            strangers = {
                name: stranger(nodes, namespace, IMAGE, node)
                for name, namespace, node in zip(WHERE, (own, other), ("node-1", "node-2"), strict=True)
            }
            until(lambda: job.run().done() > 0, waiting_for=job.told)
            begun, gang = job.run().done(), job.uids()
            copied = job.pods_read()[0]["metadata"]["labels"]
            strangers[NAMESAKE] = stranger(nodes, own, IMAGE, "node-2", copied)
            engine.catch_up()
            hosts = {pod: address(nodes, own, pod) for pod in gang}
            listening = {pod: ports(nodes, own, pod) for pod in gang}
            every = [("connect", hosts[pod], port) for pod, found in listening.items() for port in sorted(found)]
            behind_policies = {name: one.tries(every) for name, one in strangers.items()}
            known = [
                ("connect", host, port.value)
                for host in hosts.values()
                for port in (PodPort.PROGRESS, PodPort.RENDEZVOUS)
            ]
            inside = {"operator": operator(home), "gang": Inside(nodes.plane, own, min(gang))}
            let_in = {name: one.tries(known) for name, one in inside.items()}
        attacks = [
            ("end_the_job", hosts[min(gang)], PodPort.RENDEZVOUS.value),
            ("guess", hosts[min(gang)], PodPort.RENDEZVOUS.value),
            ("post", hosts[min(gang)], PodPort.PROGRESS.value),
            ("connect", hosts[min(gang)], PodPort.RANKS.value),
        ]
        turned_away = {name: one.tries(attacks) for name, one in strangers.items()}
        # Who looks for the gang by labels, as this test does, finds it too.
        nodes.plane.kubectl("delete", "pod", strangers[NAMESAKE].pod, f"--namespace={own}")
        forge(job)
        seen = job.run().done()
        until(lambda: job.run().done() > seen, waiting_for=job.told)
        status = job.read()["status"]
        yield Siege(
            listening, behind_policies, let_in, turned_away, (gang, job.uids()), (begun, job.run().done()), status
        )
        nodes.plane.api.delete(f"{JOBS.format(own)}/{job.name}")


def endless() -> dict[str, Any]:
    """Two ranks on a node each."""
    job = over_two_nodes(example())
    job["spec"]["data"] |= {"maxLength": 64}
    job["spec"]["training"] |= {"maxSteps": STEPS, "evalEvery": None, "scheduler": {"kind": "Constant"}}
    job["spec"]["checkpoint"] = {"everySteps": STEPS, "exportHuggingFace": False}
    job["spec"]["storage"] = {"size": "2Gi"}
    return job


def operator(home: Release) -> Inside:
    """A pod of the operator."""
    pods = home.get("pods?labelSelector=app.kubernetes.io/component=operator")["items"]
    return Inside(home.plane, home.namespace, pods[0]["metadata"]["name"])


def forge(job: Submitted) -> None:
    """Give a pod the marks of the gang and an attempt that never began; return when the operator has deleted it."""
    api, path = job.nodes.plane.api, f"/api/v1/namespaces/{job.namespace}/pods"
    about = job.pods_read()[0]["metadata"]
    name = f"{job.name}-trainer-{FAR}-00000"
    marks = {"labels": about["labels"] | {Label.ATTEMPT.value: str(FAR)}, "ownerReferences": about["ownerReferences"]}
    # On no node: its end is then the operator's doing alone.
    spec = {"containers": [{"name": "main", "image": IMAGE}], "nodeSelector": {"kubernetes.io/hostname": "nowhere"}}
    api.create(path, {"metadata": {"name": name, **marks}, "spec": spec})
    until(lambda: name not in {pod["metadata"]["name"] for pod in api.get(path)["items"]}, waiting_for=job.told)


@pytest.mark.parametrize("where", WHERE)
def test_a_stranger_reaches_no_port_of_a_job_where_policies_are_enforced(siege: Siege, where: str) -> None:
    for pod, found in siege.listening.items():
        assert PodPort.PROGRESS in found, f"nothing listens in {pod}"
    # Those of the contract, and those that gloo has chosen.
    assert {port for found in siege.listening.values() for port in found} > {PodPort.PROGRESS, PodPort.RENDEZVOUS}
    assert set(siege.behind_policies[where].values()) == {FILTERED}


def test_labels_of_a_gang_let_a_pod_through_its_policy(siege: Siege) -> None:
    """One who may create pods in a namespace may give them any labels, so a policy does not keep them out alone."""
    assert set(siege.behind_policies[NAMESAKE].values()) == {"open"}


def test_the_operator_reaches_what_a_job_says_of_itself_and_nothing_else(siege: Siege) -> None:
    said = {(port, answer) for (_, _, port), answer in siege.let_in["operator"].items()}
    assert said == {(PodPort.PROGRESS, "open"), (PodPort.RENDEZVOUS, FILTERED)}


def test_pods_of_a_gang_reach_each_other(siege: Siege) -> None:
    said = [answer for (_, _, port), answer in siege.let_in["gang"].items() if port == PodPort.PROGRESS]
    assert said == ["open", "open"]
    assert siege.status["restarts"]["ranks"] == 0


@pytest.mark.parametrize("where", [*WHERE, NAMESAKE])
def test_a_stranger_cannot_end_a_job_where_no_policy_is_enforced(siege: Siege, where: str) -> None:
    said = {verb: answer for (verb, _, _), answer in siege.turned_away[where].items()}
    # The launcher's nonce is all that a stranger gets.
    assert said["end_the_job"] == said["guess"] == "closed after 32 bytes"
    assert said["post"].split()[1] in ("404", "405", "501"), said["post"]
    # The store of the ranks is on the loopback of pod 0.
    assert said["connect"] == "ECONNREFUSED"


def test_the_gang_trains_through_it_all_and_a_pod_with_its_copied_marks_is_gone(siege: Siege) -> None:
    before, after = siege.gang
    assert before == after
    assert siege.done[0] < siege.done[1]
    assert siege.status["phase"] == "Running"
