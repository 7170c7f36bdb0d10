"""Gang schedulers: what the operator gives each of them, and that Kubernetes' own keeps two large jobs apart."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from cluster.control_plane.gang_stand_ins import COSCHEDULING, KUEUE, VOLCANO, served
from cluster.control_plane.jobs import body, path
from cluster.control_plane.operators import ACCOUNT, Home, installed
from cluster.control_plane.plane import GPUS_PER_NODE, ControlPlane
from cluster.control_plane.volumes import VOLUMES, create_bound_claim
from cluster.waiting import until
from moejob_api.contract.pods import Label

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("definition", "operator")]

HOME = "moejob-gangs"
ACCOUNT_NAME = f"system:serviceaccount:{HOME}:{ACCOUNT}"
# Three pods of half a node: two such jobs want more than the two nodes that there are.
MORE_THAN_HALF: dict[str, Any] = {
    "parallelism": {"tensor": 4, "data": 3},
    "training": {"globalBatchSize": 48},
    "resources": {"gpusPerNode": GPUS_PER_NODE // 2},
    "storage": {"size": None, "claimName": "checkpoints"},
}
# Two pods of half a node whose experts talk to one another in every layer.
ONE_DOMAIN: dict[str, Any] = {
    "parallelism": {"tensor": 4, "expert": 2},
    "resources": {"gpusPerNode": GPUS_PER_NODE // 2, "topologyKey": "tests.moejob.dev/rack"},
    "storage": {"size": None, "claimName": "checkpoints"},
}


@pytest.fixture(scope="module")
def home(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    control_plane.api.create("/api/v1/namespaces", {"metadata": {"name": HOME}})
    with installed(control_plane, HOME, tmp_path_factory.mktemp("gangs")) as found:
        yield found
    control_plane.api.delete(f"/api/v1/namespaces/{HOME}")
    for volume in control_plane.api.get(VOLUMES)["items"]:
        control_plane.api.delete(f"{VOLUMES}/{volume['metadata']['name']}")


@pytest.fixture(scope="module")
def operator(home: Home) -> None:
    """Looks every second whether a gang scheduler was installed."""
    home.replica("--resync-seconds=1", "--no-webhook").start()
    home.leader()


def applied(plane: ControlPlane, namespace: str, name: str = "job", **sections: Any) -> None:
    plane.api.create(path(namespace), body(name, **sections))


def pods(plane: ControlPlane, namespace: str, job: str = "job") -> list[dict[str, Any]]:
    """In the order of their indices."""
    listed = plane.api.get(f"/api/v1/namespaces/{namespace}/pods?labelSelector={Label.JOB}%3D{job}")["items"]
    return sorted(listed, key=lambda pod: str(pod["metadata"]["name"]))


def why(plane: ControlPlane, namespace: str, job: str = "job") -> str:
    """The reason and message of condition Running."""
    found = plane.api.get(path(namespace, job)).get("status", {}).get("conditions", ())
    return next((f"{said['reason']}: {said['message']}" for said in found if said["type"] == "Running"), "")


def whole(plane: ControlPlane, namespace: str, count: int, job: str = "job") -> list[dict[str, Any]]:
    """All pods of a job, once they are there."""
    until(
        lambda: len(pods(plane, namespace, job)) == count,
        waiting_for=lambda: f"{count} pods; {why(plane, namespace, job)}",
    )
    return pods(plane, namespace, job)


# --- what each of them gets -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Expected:
    """The group that a gang scheduler is given, and what pods say to it."""

    api: str
    group: Mapping[str, Any] | None = None
    labels: Mapping[str, str] = field(default_factory=dict)
    annotations: Mapping[str, str] = field(default_factory=dict)
    spec: Mapping[str, Any] = field(default_factory=dict)
    lifecycle: Mapping[str, Any] = field(default_factory=dict)


_KUEUE = Expected(
    "kueue.x-k8s.io",
    labels={"kueue.x-k8s.io/queue-name": "team", "kueue.x-k8s.io/pod-group-name": "job-0"},
    annotations={
        "kueue.x-k8s.io/pod-group-total-count": "3",
        "kueue.x-k8s.io/pod-group-pod-index-label": "moejob.dev/index",
        "kueue.x-k8s.io/retriable-in-group": "false",
    },
    spec={"schedulerName": "default-scheduler"},
)
_VOLCANO = Expected(
    "scheduling.volcano.sh/v1beta1",
    {"minMember": 3, "queue": "team"},
    annotations={"scheduling.k8s.io/group-name": "job", "scheduling.volcano.sh/group-name": "job"},
    spec={"schedulerName": "volcano"},
)
GANGS = {
    "Native": Expected(
        "scheduling.k8s.io/v1alpha2",
        {"schedulingPolicy": {"gang": {"minCount": 3}}},
        spec={"schedulingGroup": {"podGroupName": "job"}, "schedulerName": "default-scheduler"},
    ),
    "Volcano": _VOLCANO,
    "Coscheduling": Expected(
        "scheduling.x-k8s.io/v1alpha1",
        {"minMember": 3},
        labels={"scheduling.x-k8s.io/pod-group": "job"},
        spec={"schedulerName": "scheduler-plugins-scheduler"},
    ),
    "Kueue": _KUEUE,
}
QUEUED = ("Kueue", "Volcano")


@pytest.mark.parametrize("gang", GANGS)
def test_a_gang_scheduler_gets_its_group_and_its_marks(control_plane: ControlPlane, namespace: str, gang: str) -> None:
    queue = {"queue": "team"} if gang in QUEUED else {}
    with served(control_plane, VOLCANO, COSCHEDULING, KUEUE):
        wait_until_asked(control_plane)
        applied(control_plane, namespace, **MORE_THAN_HALF, lifecycle={"gang": gang} | queue)
        assert_marked(control_plane, namespace, GANGS[gang])


def wait_until_asked(plane: ControlPlane) -> None:
    """Return when the operator has asked again which APIs there are."""
    begun = plane.audit_log.stat().st_size

    def asked() -> bool:
        mine = [line["requestURI"] for line in plane.audited(begun) if line["user"]["username"] == ACCOUNT_NAME]
        # The first may have been answered before; what is asked after the second knows its answer.
        return mine.count("/apis") >= 2 and mine[-1] != "/apis"

    until(asked, waiting_for="the operator to ask which APIs there are")


def assert_marked(plane: ControlPlane, namespace: str, expected: Expected) -> None:
    """Three pods with the right marks, and the right group or none."""
    for pod in whole(plane, namespace, 3):
        about, spec = pod["metadata"], pod["spec"]
        assert about["labels"].items() >= expected.labels.items()
        assert about.get("annotations", {}).items() >= expected.annotations.items()
        assert spec.items() >= expected.spec.items()
    if expected.group is None:
        return
    group = plane.api.get(f"/apis/{expected.api}/namespaces/{namespace}/podgroups/job")
    # The API server adds what is its own and prunes what it does not know: what was sent has to come back.
    assert group["spec"].items() >= expected.group.items()
    [owner] = group["metadata"]["ownerReferences"]
    assert owner["uid"] == plane.api.get(path(namespace, "job"))["metadata"]["uid"]


# --- which of them, and none ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("gang", ["Volcano", "Coscheduling", "Kueue"])
def test_a_gang_scheduler_that_is_not_there_is_told_and_used_once_it_is(
    control_plane: ControlPlane, home: Home, namespace: str, gang: str
) -> None:
    queue = {"queue": "team"} if gang in QUEUED else {}
    wait_until_asked(control_plane)
    applied(control_plane, namespace, **MORE_THAN_HALF, lifecycle={"gang": gang} | queue)
    until(lambda: why(control_plane, namespace).startswith("GangApiMissing"), waiting_for=home.tails)
    said = why(control_plane, namespace)
    assert f"lifecycle.gang {gang} needs {GANGS[gang].api}, which this cluster does not serve" in said
    assert pods(control_plane, namespace) == []
    with served(control_plane, VOLCANO, COSCHEDULING, KUEUE):
        wait_until_asked(control_plane)
        # What was not there is looked for again every half minute.
        control_plane.api.merge(path(namespace, "job"), {"metadata": {"annotations": {"tests": "look"}}})
        assert_marked(control_plane, namespace, GANGS[gang])


AUTO = [
    pytest.param((VOLCANO, COSCHEDULING), {}, GANGS["Native"], id="without a queue Kubernetes' own"),
    pytest.param((VOLCANO, KUEUE), {"queue": "team"}, _KUEUE, id="with a queue Kueue"),
    pytest.param((VOLCANO,), {"queue": "team"}, _VOLCANO, id="with a queue and no Kueue Volcano"),
]


@pytest.mark.parametrize(("definitions", "lifecycle", "expected"), AUTO)
def test_auto_takes_what_is_there(
    control_plane: ControlPlane,
    namespace: str,
    definitions: tuple[Mapping[str, Any], ...],
    lifecycle: Mapping[str, Any],
    expected: Expected,
) -> None:
    with served(control_plane, *definitions):
        wait_until_asked(control_plane)
        applied(control_plane, namespace, **MORE_THAN_HALF, lifecycle=lifecycle)
        assert_marked(control_plane, namespace, expected)


def test_a_gang_of_kueue_is_replaced_though_kueue_holds_its_pods_until_all_have_ended(
    control_plane: ControlPlane, namespace: str
) -> None:
    with served(control_plane, KUEUE):
        wait_until_asked(control_plane)
        applied(control_plane, namespace, **MORE_THAN_HALF, lifecycle={"gang": "Kueue", "queue": "team"})
        held = whole(control_plane, namespace, 3)
        for pod in held:
            merge_pod(control_plane, pod, {"metadata": {"finalizers": ["kueue.x-k8s.io/managed"]}})
        merge_pod(control_plane, held[1], {"status": {"phase": "Failed"}}, part="/status")
        until(
            lambda: all("deletionTimestamp" in pod["metadata"] for pod in pods(control_plane, namespace)),
            waiting_for="all pods of the group to be asked to end",
        )
        assert {attempt(pod) for pod in pods(control_plane, namespace)} == {"0"}
        # As Kueue does with a group that is not to be retried, once no pod of it is active.
        for pod in pods(control_plane, namespace):
            assert pod["metadata"]["annotations"]["kueue.x-k8s.io/retriable-in-group"] == "false"
            merge_pod(control_plane, pod, {"metadata": {"finalizers": None}})
        until(
            lambda: (
                {attempt(pod) for pod in pods(control_plane, namespace)} == {"1"}
                and len(pods(control_plane, namespace)) == 3
            ),
            waiting_for="the next gang",
        )
        groups = {pod["metadata"]["labels"]["kueue.x-k8s.io/pod-group-name"] for pod in pods(control_plane, namespace)}
        assert groups == {"job-1"}


def attempt(pod: Mapping[str, Any]) -> str:
    return str(pod["metadata"]["labels"][Label.ATTEMPT])


def merge_pod(plane: ControlPlane, pod: Mapping[str, Any], change: Mapping[str, Any], part: str = "") -> None:
    about = pod["metadata"]
    plane.api.merge(f"/api/v1/namespaces/{about['namespace']}/pods/{about['name']}{part}", change)


# --- Kubernetes' own, on the real scheduler ---------------------------------------------------------------------------


def running(plane: ControlPlane, namespace: str, job: str) -> int:
    return sum(pod["status"]["phase"] == "Running" for pod in pods(plane, namespace, job))


def test_two_jobs_that_each_want_more_than_half_the_gpus_run_one_after_the_other(
    control_plane: ControlPlane, home: Home, namespace: str
) -> None:
    jobs = ("one", "two")
    create_bound_claim(control_plane, namespace, "checkpoints")
    for name in jobs:
        applied(control_plane, namespace, name, **MORE_THAN_HALF)
    for name in jobs:
        whole(control_plane, namespace, 3, name)
    [first] = until(
        lambda: [name for name in jobs if running(control_plane, namespace, name) == 3],
        waiting_for="one job to run whole",
    )
    [second] = {*jobs} - {first}
    until(
        lambda: why(control_plane, namespace, second).startswith("Unschedulable"),
        waiting_for=home.tails,
    )
    assert [pod["spec"].get("nodeName") for pod in pods(control_plane, namespace, second)] == [None] * 3
    for pod in pods(control_plane, namespace, first):
        merge_pod(control_plane, pod, {"status": {"phase": "Succeeded"}}, part="/status")
    until(
        lambda: (
            running(control_plane, namespace, second) == 3
            and control_plane.api.get(path(namespace, second))["status"]["phase"] == "Running"
        ),
        waiting_for=lambda: f"{second} to run: {why(control_plane, namespace, second)}",
    )
    assert control_plane.api.get(path(namespace, first))["status"]["phase"] == "Succeeded"


def test_a_gang_that_talks_in_every_layer_is_kept_in_one_domain(control_plane: ControlPlane, namespace: str) -> None:
    for node in control_plane.nodes:
        control_plane.api.merge(f"/api/v1/nodes/{node}", {"metadata": {"labels": {"tests.moejob.dev/rack": node}}})
    create_bound_claim(control_plane, namespace, "checkpoints")
    applied(control_plane, namespace, **ONE_DOMAIN)
    whole(control_plane, namespace, 2)
    group = control_plane.api.get(f"/apis/scheduling.k8s.io/v1alpha2/namespaces/{namespace}/podgroups/job")
    assert group["spec"]["schedulingConstraints"] == {"topology": [{"key": "tests.moejob.dev/rack"}]}
    until(lambda: running(control_plane, namespace, "job") == 2, waiting_for="both pods to run")
    # One pod a node would be the scheduler's own choice: each is half full then.
    assert len({pod["spec"]["nodeName"] for pod in pods(control_plane, namespace)}) == 1


def test_the_operator_had_every_right_that_it_asked_for(control_plane: ControlPlane) -> None:
    lines = control_plane.audited()
    mine = [line["responseStatus"] for line in lines if line["user"]["username"] == ACCOUNT_NAME]
    assert mine
    assert [said["message"] for said in mine if said.get("code") == 403 and " cannot " in said.get("message", "")] == []
