"""Obstacles of jobs, as the operator writes them beside a real API server, scheduler and volume controller."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from cluster.control_plane.api import RefusedError
from cluster.control_plane.jobs import body, path
from cluster.control_plane.operators import Home, installed
from cluster.control_plane.plane import GPUS_PER_NODE, ControlPlane
from cluster.control_plane.volumes import VOLUMES, create_bound_claim
from cluster.waiting import until
from moejob_api.diagnosis.blockers import Blocker

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("definition", "operator")]

HOME = "moejob-obstacles"
# One pod of one GPU, which every node has room for.
ONE: Mapping[str, Any] = {
    "parallelism": {"tensor": 1},
    "resources": {"gpusPerNode": 1},
    "storage": {"size": None, "claimName": "checkpoints"},
    "lifecycle": {"gang": "None"},
}
HOOKS = "/apis/admissionregistration.k8s.io/v1/validatingwebhookconfigurations"
Arrange = Callable[[ControlPlane, str], None]


@pytest.fixture(scope="module")
def home(control_plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Home]:
    control_plane.api.create("/api/v1/namespaces", {"metadata": {"name": HOME}})
    with installed(control_plane, HOME, tmp_path_factory.mktemp("obstacles")) as found:
        yield found
    control_plane.api.delete(f"/api/v1/namespaces/{HOME}")
    for volume in control_plane.api.get(VOLUMES)["items"]:
        control_plane.api.delete(f"{VOLUMES}/{volume['metadata']['name']}")


@pytest.fixture(scope="module")
def operator(home: Home) -> None:
    home.replica("--no-webhook").start()
    home.leader()


def nothing(_plane: ControlPlane, _namespace: str) -> None:
    """The cluster is as it is."""


def bound_claim(plane: ControlPlane, namespace: str) -> None:
    create_bound_claim(plane, namespace, "checkpoints")


def no_pods_left(plane: ControlPlane, namespace: str) -> None:
    """A quota that is counted before the job comes."""
    at = f"/api/v1/namespaces/{namespace}/resourcequotas"
    plane.api.create(at, {"metadata": {"name": "gpus"}, "spec": {"hard": {"pods": "0"}}})
    until(lambda: plane.api.get(f"{at}/gpus").get("status", {}).get("used"), waiting_for="the quota to be counted")


def small_containers_only(plane: ControlPlane, namespace: str) -> None:
    limits = [{"type": "Container", "max": {"memory": "1Gi"}}]
    at = f"/api/v1/namespaces/{namespace}/limitranges"
    plane.api.create(at, {"metadata": {"name": "small"}, "spec": {"limits": limits}})


def restricted_pods_only(plane: ControlPlane, namespace: str) -> None:
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    plane.api.merge(f"/api/v1/namespaces/{namespace}", {"metadata": {"labels": labels}})


def service_of_another(plane: ControlPlane, namespace: str) -> None:
    service = {"metadata": {"name": "job-moejob"}, "spec": {"ports": [{"port": 1}]}}
    plane.api.create(f"/api/v1/namespaces/{namespace}/services", service)


def webhook_that_is_down(plane: ControlPlane, namespace: str) -> None:
    """A webhook about the pods of this namespace, on a port where nothing listens."""
    hook = {
        "name": "pods.example.com",
        "clientConfig": {"url": "https://127.0.0.1:1/"},
        "rules": [{"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": namespace}},
        "admissionReviewVersions": ["v1"],
        "sideEffects": "None",
        "failurePolicy": "Fail",
        "timeoutSeconds": 1,
    }
    plane.api.create(HOOKS, {"metadata": {"name": namespace}, "webhooks": [hook]})
    pod = {"metadata": {"name": "probe"}, "spec": {"containers": [{"name": "main", "image": "none"}]}}

    def is_in_force() -> bool:
        try:
            plane.api.create(f"/api/v1/namespaces/{namespace}/pods?dryRun=All", pod)
        except RefusedError as refused:
            return "failed calling webhook" in refused.message
        return False

    until(is_in_force, waiting_for="the webhook to be asked")


@dataclass(frozen=True)
class Case:
    """A state of the cluster, the sections of a job, and the words of its status about them."""

    blocker: Blocker
    says: str
    arrange: Arrange = nothing
    job: Mapping[str, Any] = field(default_factory=dict)


def resources(**fields: Any) -> Mapping[str, Any]:
    return {"resources": {"gpusPerNode": 1, **fields}}


CASES = {
    "a quota is used up": Case(Blocker.QUOTA_EXCEEDED, "exceeded quota: gpus, requested: pods=1", no_pods_left),
    "a LimitRange is exceeded": Case(
        Blocker.LIMIT_RANGE,
        "maximum memory usage per Container is 1Gi",
        small_containers_only,
        resources(memory="1Ti"),
    ),
    "a service account is missing": Case(
        Blocker.SERVICE_ACCOUNT_MISSING, 'serviceaccount "nobody" not found', job=resources(serviceAccount="nobody")
    ),
    "a priority class is missing": Case(
        Blocker.PRIORITY_CLASS_MISSING, "no PriorityClass with name high", job=resources(priorityClassName="high")
    ),
    "a runtime class is missing": Case(
        Blocker.RUNTIME_CLASS_MISSING, 'RuntimeClass "nvidia" not found', job=resources(runtimeClassName="nvidia")
    ),
    "a Service of another client has the name": Case(
        Blocker.NAME_TAKEN, "a Service job-moejob is in the way", service_of_another
    ),
    "an admission webhook is down": Case(
        Blocker.ADMISSION_WEBHOOK_DOWN, 'failed calling webhook "pods.example.com"', webhook_that_is_down
    ),
    "no node has the label": Case(
        Blocker.NODE_SELECTOR,
        "nodes lack a label of resources.nodeSelector",
        bound_claim,
        resources(nodeSelector={"zone": "mars"}),
    ),
    "no node has as many GPUs": Case(
        Blocker.INSUFFICIENT_GPUS,
        "nvidia.com/gpu is used up",
        bound_claim,
        {"parallelism": {"data": 2 * GPUS_PER_NODE}, "resources": {"gpusPerNode": 2 * GPUS_PER_NODE}},
    ),
    "no node has that much memory": Case(
        Blocker.INSUFFICIENT_MEMORY, "memory is used up", bound_claim, resources(memory="64Ti")
    ),
    "no node has a network card": Case(
        Blocker.INSUFFICIENT_RESOURCE,
        "rdma/hca is used up",
        bound_claim,
        resources(rdma={"resource": "rdma/hca"}),
    ),
    "the claim that is named does not exist": Case(Blocker.CLAIM_MISSING, "there is no claim checkpoints"),
    "a claim waits for a volume of its class": Case(
        Blocker.CLAIM_UNBOUND,
        "claim job-storage of storage class fast is not bound to a volume yet",
        job={"storage": {"size": "4Ti", "claimName": None, "storageClass": "fast"}},
    ),
    "the gang scheduler is not installed": Case(
        Blocker.GANG_SCHEDULER_MISSING, "lifecycle.gang Volcano needs", job={"lifecycle": {"gang": "Volcano"}}
    ),
    "the whole gang does not fit": Case(
        # The scheduler names what the nodes lack, also of a gang.
        Blocker.INSUFFICIENT_GPUS,
        "nvidia.com/gpu is used up",
        bound_claim,
        {
            "parallelism": {"data": 9 * GPUS_PER_NODE},
            "training": {"globalBatchSize": 144},
            "resources": {"gpusPerNode": GPUS_PER_NODE},
            "lifecycle": {"gang": "Native"},
        },
    ),
    "the job is suspended": Case(Blocker.SUSPENDED, "lifecycle.suspend is true", job={"lifecycle": {"suspend": True}}),
    "the layout does not divide the heads": Case(
        Blocker.JOB_REFUSED, "tensor", job={"parallelism": {"tensor": 3}, "resources": {"gpusPerNode": 3}}
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_the_status_says_what_is_in_the_way(control_plane: ControlPlane, home: Home, namespace: str, name: str) -> None:
    case = CASES[name]
    case.arrange(control_plane, namespace)
    sections = {key: {**ONE.get(key, {}), **value} for key, value in case.job.items()}
    control_plane.api.create(path(namespace), body(**{**ONE, **sections}))
    try:
        until(
            lambda: written_why(control_plane, namespace).get("blocker") == case.blocker,
            waiting_for=lambda: f"{case.blocker}: {written_why(control_plane, namespace)} {home.tails()[-2000:]}",
        )
        why = written_why(control_plane, namespace)
        assert case.says in why["message"]
        assert why["next"]
        assert why["fix"]
        assert case.blocker in control_plane.kubectl("get", "mtj", "job", f"--namespace={namespace}", "--output=wide")
    finally:
        control_plane.api.delete(path(namespace, "job"))
        if case.arrange is webhook_that_is_down:
            control_plane.api.delete(f"{HOOKS}/{namespace}")


def written_why(plane: ControlPlane, namespace: str) -> dict[str, Any]:
    """The obstacle in the status of the job."""
    why: dict[str, Any] = plane.api.get(path(namespace, "job")).get("status", {}).get("why") or {}
    return why


def test_an_obstacle_that_stays_is_written_once(control_plane: ControlPlane, namespace: str) -> None:
    """Neither time nor other jobs of the namespace write it again."""
    create_bound_claim(control_plane, namespace, "checkpoints")
    control_plane.api.create(
        path(namespace), body(**{**ONE, "resources": {"gpusPerNode": 1, "nodeSelector": {"a": "b"}}})
    )
    until(lambda: written_why(control_plane, namespace).get("blocker") == Blocker.NODE_SELECTOR, waiting_for="its word")
    before = control_plane.api.get(path(namespace, "job"))
    for number in range(3):
        control_plane.api.merge(
            path(namespace, "job"), {"metadata": {"annotations": {"tests.moejob.dev/look": str(number)}}}
        )
    begun = control_plane.audit_log.stat().st_size
    control_plane.api.merge(path(namespace, "job"), {"metadata": {"annotations": {"tests.moejob.dev/look": "last"}}})
    until(lambda: control_plane.audited(begun), waiting_for="the audit log")
    after = control_plane.api.get(path(namespace, "job"))
    assert json.dumps(after["status"]["why"]) == json.dumps(before["status"]["why"])
    control_plane.api.delete(path(namespace, "job"))
