"""The ground of jobs: pods of two nodes find one another, share files, end as they should; nodes can be lost."""

from __future__ import annotations

import os
import signal
import socket
from pathlib import Path

import pytest

from cluster.binaries import KUBERNETES
from cluster.control_plane.plane import KubectlError
from cluster.nodes.cluster import Cluster
from cluster.nodes.pods import VOLUME, Pods, Shell
from cluster.nodes.storage import StorageClass
from cluster.waiting import until

pytestmark = pytest.mark.cluster

SLEEP = "exec sleep 600"


def test_both_nodes_are_of_the_pinned_version(nodes: Cluster) -> None:
    listed = nodes.plane.api.get("/api/v1/nodes")["items"]
    assert {node["metadata"]["name"]: node["status"]["nodeInfo"]["kubeletVersion"] for node in listed} == dict.fromkeys(
        nodes.nodes, f"v{KUBERNETES.version}"
    )


# --- network --------------------------------------------------------------------------------------------------------


def test_a_pod_that_is_not_ready_is_reached_by_name_from_the_other_node(pods: Pods) -> None:
    pods.create_service("gang")
    serve = "echo from $(hostname) >/index.html; exec httpd -f -p 8080 -h /"
    pods.run("rank-0", Shell(serve, node="node-1", service="gang", is_ready=False))
    ask = "until wget -q -O - http://rank-0.gang:8080/; do sleep 0.2; done"
    assert pods.output("rank-1", Shell(ask, node="node-2", service="gang")).endswith("from rank-0\n")


@pytest.mark.parametrize("node", ["node-1", "node-2"])
def test_a_service_is_reached_at_its_address_from_either_node(pods: Pods, node: str) -> None:
    pods.create_service("web", headless=False)
    serve = "echo served >/index.html; exec httpd -f -p 8080 -h /"
    pods.run("server", Shell(serve, node="node-1", service="web"))
    ask = "until wget -q -O - http://web:8080/; do sleep 0.2; done"
    assert pods.output("client", Shell(ask, node=node)).endswith("served\n")


def test_a_pod_reaches_the_api_server_at_its_service(pods: Pods) -> None:
    assert pods.output("client", Shell("nc -w 5 kubernetes.default 443 </dev/null && echo reached")) == "reached\n"


def test_this_machine_reaches_pods(pods: Pods) -> None:
    pods.run("server", Shell("exec httpd -f -p 8080", node="node-2"))
    address = pods.get("server")["status"]["podIP"]

    def is_reached() -> bool:
        try:
            with socket.create_connection((address, 8080), timeout=1):
                return True
        except OSError:
            return False

    until(is_reached, waiting_for=f"a connection to {address}")


# --- pods -----------------------------------------------------------------------------------------------------------


def test_commands_run_in_a_pod_and_its_words_are_read(pods: Pods) -> None:
    pods.run("talker", Shell(f"echo said at start; {SLEEP}"))
    assert pods.logs("talker") == "said at start\n"
    assert pods.exec("talker", "echo $((6 * 7)) on $(hostname)") == "42 on talker\n"
    with pytest.raises(KubectlError, match="exit code 3"):
        pods.exec("talker", "exit 3")


def test_a_pod_that_takes_more_memory_than_it_may_is_killed_for_it(pods: Pods) -> None:
    pods.create("greedy", Shell("dd if=/dev/zero of=/dev/null bs=200M count=1", memory="32Mi"))
    pods.await_phase("greedy", "Failed")
    ending = pods.ending("greedy")
    assert (ending["reason"], ending["exitCode"]) == ("OOMKilled", 137)


def test_a_pod_that_is_deleted_may_finish_within_its_grace(pods: Pods, nodes: Cluster) -> None:
    pods.create_claim("notes")
    farewell = f"trap 'sleep 1; echo farewell >{VOLUME}/said; exit 0' TERM; touch {VOLUME}/started"
    wait = "while :; do sleep 0.1; done"
    pods.run("polite", Shell(f"{farewell}; {wait}", claim="notes", grace_seconds=20))
    written = nodes.storage.volume_path(pods.namespace, "notes")
    until((written / "started").exists, waiting_for="the trap to be set")
    pods.delete("polite")
    until(lambda: pods.is_gone("polite"), waiting_for="the end of the pod")
    assert (written / "said").read_text() == "farewell\n"


def test_processes_of_a_pod_can_be_held_and_killed_from_outside(pods: Pods, nodes: Cluster) -> None:
    pods.run("victim", Shell("sleep 600; echo ended with $?", node="node-2"))
    [sleep] = [
        pid
        for pid in nodes.pids(pods.namespace, "victim")
        if Path(f"/proc/{pid}/cmdline").read_bytes() == b"sleep\x00600\x00"
    ]
    os.kill(sleep, signal.SIGSTOP)
    until(lambda: process_state(sleep) == "T", waiting_for="the process to be held")
    os.kill(sleep, signal.SIGKILL)
    pods.await_phase("victim", "Succeeded")
    assert "ended with 137" in pods.logs("victim").splitlines(), "its shell says Killed before or after"


# --- volumes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("storage_class", [None, StorageClass.SIZED], ids=["default class", "a file system of its own"])
def test_what_one_node_writes_the_other_reads(pods: Pods, storage_class: str | None) -> None:
    pods.create_claim("shared", "64Mi", storage_class)
    pods.output("writer", Shell(f"echo written >{VOLUME}/file", node="node-1", claim="shared"))
    assert pods.output("reader", Shell(f"cat {VOLUME}/file", node="node-2", claim="shared")) == "written\n"


def test_a_file_system_of_its_own_can_be_filled(pods: Pods) -> None:
    pods.create_claim("small", "16Mi", StorageClass.SIZED)
    fill = f"dd if=/dev/zero of={VOLUME}/file bs=1M count=32 2>&1 || echo refused"
    said = pods.output("writer", Shell(fill, claim="small"))
    assert "No space left on device" in said
    assert said.endswith("refused\n")


def test_a_volume_goes_with_its_claim(pods: Pods, nodes: Cluster) -> None:
    pods.create_claim("brief", "16Mi", StorageClass.SIZED)
    pods.output("user", Shell("true", claim="brief"))
    path = nodes.storage.volume_path(pods.namespace, "brief")
    pods.delete("user")
    pods.plane.api.delete(f"/api/v1/namespaces/{pods.namespace}/persistentvolumeclaims/brief")
    until(lambda: not path.exists(), waiting_for=f"the end of {path}")


# --- nodes ----------------------------------------------------------------------------------------------------------


def test_a_third_pod_finds_no_gpus_on_two_nodes(pods: Pods) -> None:
    for index in range(2):
        pods.run(f"fits-{index}", Shell(SLEEP, gpus=5))
    assert len({pods.get(f"fits-{index}")["spec"]["nodeName"] for index in range(2)}) == 2
    pods.create("too-many", Shell(SLEEP, gpus=5))

    def refusal() -> str | None:
        said = {condition["type"]: condition for condition in pods.get("too-many")["status"].get("conditions", [])}
        message: str | None = said.get("PodScheduled", {}).get("message")
        return message

    assert "2 Insufficient nvidia.com/gpu" in (until(refusal, waiting_for="a refusal") or "")


def test_a_node_that_is_cut_off_is_lost_and_comes_back_with_its_pods(pods: Pods, nodes: Cluster) -> None:
    pods.run("distant", Shell(SLEEP, node="node-2"))
    nodes.cut_off("node-2")
    try:
        until(lambda: not nodes.is_ready("node-2"), waiting_for="node-2 to be lost")
        assert nodes.is_ready("node-1")
        assert nodes.pids(pods.namespace, "distant"), "the pod runs on, where nobody sees it"
    finally:
        nodes.reconnect("node-2")
        nodes.await_ready("node-2")
    assert pods.exec("distant", "echo still here") == "still here\n"


def test_pods_outlive_the_kubelet(pods: Pods, nodes: Cluster) -> None:
    pods.run("steady", Shell(SLEEP, node="node-1"))
    before = nodes.pids(pods.namespace, "steady")
    nodes.nodes["node-1"].kubelet.stop()
    nodes.start_kubelet("node-1")
    until(lambda: repeats_words(pods, "steady", "still here"), waiting_for="the kubelet to know its pods again")
    assert nodes.pids(pods.namespace, "steady") == before
    allocatable = nodes.plane.api.get("/api/v1/nodes/node-1")["status"]["allocatable"]
    assert allocatable["nvidia.com/gpu"] == "8"


def process_state(pid: int) -> str:
    """R, S, T or whatever else the kernel says of a process."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def repeats_words(pods: Pods, name: str, words: str) -> bool:
    """Return whether a pod repeats words, by way of its kubelet."""
    try:
        return pods.exec(name, f"echo {words}") == f"{words}\n"
    except KubectlError:
        return False
