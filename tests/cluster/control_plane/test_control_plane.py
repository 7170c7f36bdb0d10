"""The control plane that the other tests stand on: it starts, survives the loss of its parts, schedules, and ends."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cluster.binaries import KUBERNETES
from cluster.control_plane.components import Component
from cluster.control_plane.plane import GPUS_PER_NODE, ControlPlane, KubectlError
from cluster.waiting import until

pytestmark = pytest.mark.cluster

TESTS = Path(__file__).parents[2]


def test_it_is_of_the_pinned_version(control_plane: ControlPlane) -> None:
    version = control_plane.api.get("/version")
    assert (int(version["major"]), int(version["minor"])) == KUBERNETES.version[:2]


@pytest.mark.parametrize("component", Component)
def test_a_component_that_crashed_does_its_work_again(
    control_plane: ControlPlane, namespace: str, component: Component
) -> None:
    crashed = control_plane.processes[component].pid
    control_plane.restart(component)
    assert control_plane.processes[component].pid not in (crashed, None)
    create_pod(control_plane, namespace, "after")
    until(lambda: running(control_plane, namespace) == {"after"}, waiting_for="a pod to run")


def test_a_service_account_may_do_nothing_by_itself(control_plane: ControlPlane, namespace: str) -> None:
    kubeconfig = f"--kubeconfig={control_plane.service_account_kubeconfig(namespace, 'default')}"
    assert f"system:serviceaccount:{namespace}:default" in control_plane.kubectl("auth", "whoami", kubeconfig)
    with pytest.raises(KubectlError, match="forbidden"):
        control_plane.kubectl("get", "pods", kubeconfig)


def test_the_audit_log_says_who_wrote_what(control_plane: ControlPlane, namespace: str) -> None:
    create_pod(control_plane, namespace, "seen")

    def created_pods() -> list[tuple[str, str]]:
        events = control_plane.audited()
        return [
            (event["user"]["username"], event["requestObject"]["metadata"]["name"])
            for event in events
            if event["requestURI"] == f"/api/v1/namespaces/{namespace}/pods" and event["verb"] == "create"
        ]

    assert until(created_pods, waiting_for="the audit log") == [("admin", "seen")]


# --- scheduling -----------------------------------------------------------------------------------------------------


def test_a_pod_that_asks_for_more_gpus_than_a_node_has_stays_pending(
    control_plane: ControlPlane, namespace: str
) -> None:
    create_pod(control_plane, namespace, "large", gpus=GPUS_PER_NODE + 1)
    create_pod(control_plane, namespace, "fitting", gpus=GPUS_PER_NODE)

    def refused() -> bool:
        return conditions(control_plane, namespace)["large"].get("PodScheduled") == "False"

    until(refused, waiting_for="the scheduler to refuse the large pod")
    until(lambda: running(control_plane, namespace) == {"fitting"}, waiting_for="the fitting pod to run")


def test_two_gangs_that_do_not_fit_together_run_one_after_the_other(
    control_plane: ControlPlane, namespace: str
) -> None:
    gangs = {gang: {f"{gang}-{index}" for index in range(3)} for gang in ("a", "b")}
    for gang in gangs:
        create_gang(control_plane, namespace, gang, size=3)
    gpus = GPUS_PER_NODE * len(control_plane.nodes) // 4
    # Taken in turn, each gang gets two of the four places, and without gang scheduling both would wait for ever.
    for index in range(3):
        for gang in gangs:
            create_pod(
                control_plane,
                namespace,
                f"{gang}-{index}",
                gpus=gpus,
                gang=gang,
            )

    def whole_gangs() -> list[str]:
        return [gang for gang, pods in gangs.items() if running(control_plane, namespace) == pods]

    [first] = until(whole_gangs, waiting_for="one gang to run whole, and no pod of the other")
    [second] = gangs.keys() - {first}
    until(
        lambda: gang_is_refused(control_plane, namespace, second),
        waiting_for=f"{second} to be refused whole",
    )
    assert whole_gangs() == [first]
    for name in gangs[first]:
        control_plane.api.delete(f"/api/v1/namespaces/{namespace}/pods/{name}")
    until(lambda: whole_gangs() == [second], waiting_for=f"{second} to run whole")


# --- the end --------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.usefixtures("programs")
@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGKILL], ids=["asked to end", "killed"])
def test_nothing_outlives_its_owner(tmp_path: Path, end: signal.Signals) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-m", "cluster.control_plane", tmp_path, "1"],
        env=os.environ | {"PYTHONPATH": str(TESTS)},
        stdout=subprocess.PIPE,
        text=True,
    )
    with owner:
        try:
            assert owner.stdout is not None
            assert owner.stdout.readline().startswith("export KUBECONFIG=")
            # The owner and every component name the folder.
            assert len(processes_of(tmp_path)) == 1 + len(Component)
            owner.send_signal(end)
            owner.wait(30)
        finally:
            owner.kill()
    until(lambda: not processes_of(tmp_path), waiting_for="the end of all processes")


def processes_of(folder: Path) -> set[str]:
    """Those that name the folder in their command line."""
    named = set()
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if str(folder).encode() in (process / "cmdline").read_bytes():
                named.add(process.name)
        except (FileNotFoundError, ProcessLookupError):
            continue
    return named


# --- pods -----------------------------------------------------------------------------------------------------------


def create_pod(plane: ControlPlane, namespace: str, name: str, gpus: int = 0, gang: str | None = None) -> None:
    """A pod that kwok will only pretend to run."""
    container = {
        "name": "main",
        "image": "none",
        "resources": {"limits": {"nvidia.com/gpu": str(gpus)}},
    }
    spec: dict[str, Any] = {"containers": [container], "restartPolicy": "Never"}
    if gang is not None:
        spec["schedulingGroup"] = {"podGroupName": gang}
    plane.api.create(f"/api/v1/namespaces/{namespace}/pods", {"metadata": {"name": name}, "spec": spec})


def create_gang(plane: ControlPlane, namespace: str, name: str, size: int) -> None:
    """Kubernetes' own gang: all of its pods are placed, or none."""
    body = {"metadata": {"name": name}, "spec": {"schedulingPolicy": {"gang": {"minCount": size}}}}
    plane.api.create(f"/apis/scheduling.k8s.io/v1alpha2/namespaces/{namespace}/podgroups", body)


def gang_is_refused(plane: ControlPlane, namespace: str, name: str) -> bool:
    """Return whether the scheduler has said that the gang has no place."""
    group = plane.api.get(f"/apis/scheduling.k8s.io/v1alpha2/namespaces/{namespace}/podgroups/{name}")
    said = {condition["type"]: condition["status"] for condition in group.get("status", {}).get("conditions", ())}
    return said.get("PodGroupScheduled") == "False"


def running(plane: ControlPlane, namespace: str) -> set[str]:
    """Names of the pods that run."""
    pods = plane.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
    return {pod["metadata"]["name"] for pod in pods if pod["status"]["phase"] == "Running"}


def conditions(plane: ControlPlane, namespace: str) -> dict[str, dict[str, str]]:
    """The conditions of each pod."""
    pods = plane.api.get(f"/api/v1/namespaces/{namespace}/pods")["items"]
    return {
        pod["metadata"]["name"]: {said["type"]: said["status"] for said in pod["status"].get("conditions", ())}
        for pod in pods
    }
