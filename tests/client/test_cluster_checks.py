"""Checks of a cluster: each answer of an API server becomes one finding, with its fix."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

import pytest

from moejob_api.crd.definition import crd_definition
from moejob_client.cluster_checks import CheckFinding, CheckResult, run_checks
from stand_in_api import Answer, list_answer, refusal_answer, serve_stand_in

REVIEWS = "POST /apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
DEFINITION = "GET /openapi/v3/apis/moejob.dev/v1alpha1"
CLASSES = "GET /apis/storage.k8s.io/v1/storageclasses"
NODES = "GET /api/v1/nodes"
QUEUES = "GET /apis/kueue.x-k8s.io/v1beta1/namespaces/team/localqueues"
JOBS = "GET /apis/moejob.dev/v1alpha1/namespaces/team/moetrainingjobs"
PODS = "GET /api/v1/namespaces/team/pods"
DENIED = refusal_answer(403, "Forbidden", "User cannot list")


def served_definition(without: str = "") -> Answer:
    """The document of a cluster whose CRD may lack a section of spec."""
    schema: Any = crd_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]  # type: ignore[index,call-overload]
    spec = schema["properties"]["spec"]
    properties = {name: field for name, field in spec["properties"].items() if name != without}
    served = schema | {"properties": schema["properties"] | {"spec": spec | {"properties": properties}}}
    return 200, {"components": {"schemas": {"dev.moejob.v1alpha1.MoETrainingJob": served}}}


def storage_class(name: str, is_default: bool) -> dict[str, Any]:
    annotation = {"storageclass.kubernetes.io/is-default-class": str(is_default).lower()}
    return {"metadata": {"name": name, "annotations": annotation}}


def node(driver: str = "", **offers: str) -> dict[str, Any]:
    labels = {"nvidia.com/cuda.driver-version.major": driver} if driver else {}
    return {"metadata": {"name": "node", "labels": labels}, "status": {"allocatable": {"cpu": "8", **offers}}}


def gpu_node(driver: str = "") -> dict[str, Any]:
    return node(driver, **{"nvidia.com/gpu": "8"})


def job_with_image(image: str) -> dict[str, Any]:
    return {"metadata": {"name": "job"}, "spec": {"resources": {"image": image}}}


def pod_that_waits(reason: str) -> dict[str, Any]:
    state = {"waiting": {"reason": reason, "message": "no such tag"}}
    return {
        "metadata": {"name": "job-0", "labels": {"moejob.dev/job": "job"}},
        "spec": {"nodeName": "node-1", "containers": [{"image": "registry:5000/trainer:1"}]},
        "status": {"containerStatuses": [{"name": "trainer", "image": "registry:5000/trainer:1", "state": state}]},
    }


GOOD: Mapping[str, Answer] = {
    "GET /version": (200, {"gitVersion": "v1.36.1"}),
    DEFINITION: served_definition(),
    REVIEWS: (200, {"status": {"allowed": True}}),
    CLASSES: list_answer(storage_class("fast", is_default=True)),
    NODES: list_answer(node("580", **{"nvidia.com/gpu": "8", "rdma/hca": "1"}), node()),
    JOBS: list_answer(job_with_image("registry:5000/trainer:1")),
    PODS: list_answer(pod_that_waits("ContainerCreating")),
    QUEUES: list_answer({"metadata": {"name": "main"}}),
}


def find(answers: Mapping[str, Answer]) -> list[CheckFinding]:
    async def story() -> list[CheckFinding]:
        async with serve_stand_in() as (server, api):
            for request, answer in {**GOOD, **answers}.items():
                server.set_answers(request, answer)
            return [finding async for finding in run_checks(api, "team")]

    return asyncio.run(story())


def test_a_cluster_that_has_all_is_found_well() -> None:
    findings = find({})
    assert {finding.result for finding in findings} == {CheckResult.OK}
    words = " ".join(finding.message for finding in findings)
    for word in (
        "v1.36.1",
        "every field",
        "fast",
        "8 of nvidia.com/gpu on 1 of 2 nodes",
        "rdma/hca",
        "queues main",
        "driver 580",
    ):
        assert word in words


@pytest.mark.parametrize(
    ("request_name", "answer", "result", "words"),
    [
        pytest.param(
            DEFINITION, refusal_answer(404, "NotFound"), "failed", "does not know MoETrainingJob", id="no definition"
        ),
        pytest.param(
            DEFINITION, served_definition("checkpoint"), "warning", "lacks spec.checkpoint", id="an older CRD"
        ),
        pytest.param(
            REVIEWS, (200, {"status": {"allowed": False}}), "warning", "no right to create pods/exec", id="no rights"
        ),
        pytest.param(CLASSES, list_answer(), "warning", "no default StorageClass; there is none", id="no class"),
        pytest.param(
            CLASSES, list_answer(storage_class("slow", is_default=False)), "warning", "there is slow", id="no default"
        ),
        pytest.param(CLASSES, DENIED, "unknown", "list StorageClasses", id="no right to classes"),
        pytest.param(NODES, list_answer(node()), "warning", "none of 1 nodes offers nvidia.com/gpu", id="no GPUs"),
        pytest.param(NODES, list_answer(node()), "ok", "pods use TCP", id="no RDMA"),
        pytest.param(
            NODES, list_answer(gpu_node("570")), "warning", "driver 580 or later; node has 570", id="old driver"
        ),
        pytest.param(NODES, list_answer(gpu_node()), "unknown", "does not report its driver", id="silent driver"),
        pytest.param(
            PODS,
            list_answer(pod_that_waits("ErrImagePull")),
            "warning",
            "node-1 cannot pull registry:5000/trainer:1 for job-0: no such tag",
            id="pull fails",
        ),
        pytest.param(PODS, DENIED, "unknown", "let you list pods", id="no right to pods"),
        pytest.param(
            JOBS, list_answer(job_with_image("registry:5000/own")), "warning", "registry:5000/own may be", id="no tag"
        ),
        pytest.param(JOBS, list_answer(job_with_image("own:latest")), "warning", "own:latest may be", id="latest"),
        pytest.param(JOBS, list_answer(job_with_image("own@sha256:ab")), "ok", "each of 2 has", id="digest"),
        pytest.param(NODES, DENIED, "unknown", "list nodes", id="no right to nodes"),
        pytest.param(QUEUES, refusal_answer(404, "NotFound"), "ok", "Kueue is not installed", id="no Kueue"),
        pytest.param(QUEUES, list_answer(), "warning", "team has no LocalQueue", id="no queue"),
        pytest.param(QUEUES, DENIED, "unknown", "list LocalQueues", id="no right to queues"),
    ],
)
def test_an_answer_becomes_a_finding(request_name: str, answer: Answer, result: str, words: str) -> None:
    findings = find({request_name: answer})
    [found] = [finding for finding in findings if words in finding.message]
    assert found.result == result
    assert bool(found.fix) == (result in ("warning", "failed"))
