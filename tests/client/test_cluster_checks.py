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


def node(**offers: str) -> dict[str, Any]:
    return {"metadata": {"name": "node"}, "status": {"allocatable": {"cpu": "8", **offers}}}


GOOD: Mapping[str, Answer] = {
    "GET /version": (200, {"gitVersion": "v1.36.1"}),
    DEFINITION: served_definition(),
    REVIEWS: (200, {"status": {"allowed": True}}),
    CLASSES: list_answer(storage_class("fast", is_default=True)),
    NODES: list_answer(node(**{"nvidia.com/gpu": "8", "rdma/hca": "1"}), node()),
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
    for word in ("v1.36.1", "every field", "fast", "8 of nvidia.com/gpu on 1 of 2 nodes", "rdma/hca", "queues main"):
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
