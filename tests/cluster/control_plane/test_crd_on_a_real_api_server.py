"""The CRD on a real API server, without any webhook: what it takes, refuses, fills in and prints."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from broken_specs import BROKEN_SPECS, BrokenSpec
from builders import GRPO, SFT, spec
from cluster.control_plane import jobs
from cluster.control_plane.api import RefusedError
from cluster.control_plane.plane import ControlPlane, KubectlError
from moejob_api.job import Spec
from moejob_api.job.parallelism import Parallelism
from moejob_api.rules.object_rules import OBJECT_RULES

pytestmark = [pytest.mark.cluster, pytest.mark.usefixtures("definition")]

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_definition_is_established(control_plane: ControlPlane) -> None:
    seen = control_plane.api.get("/apis/apiextensions.k8s.io/v1/customresourcedefinitions/moetrainingjobs.moejob.dev")
    conditions = {condition["type"]: condition["status"] for condition in seen["status"]["conditions"]}
    assert conditions == {"NamesAccepted": "True", "Established": "True"}


def test_the_definition_can_be_applied_again_by_the_client(control_plane: ControlPlane, definition: Path) -> None:
    assert control_plane.kubectl("apply", "--server-side=false", "-f", definition).endswith(" unchanged\n")


def test_every_example_is_accepted(control_plane: ControlPlane, namespace: str) -> None:
    accepted = control_plane.kubectl("apply", "--dry-run=server", f"--namespace={namespace}", "-f", EXAMPLES)
    assert accepted.count("(server dry run)") >= len(list(EXAMPLES.glob("*.yaml"))) > 0


@pytest.mark.parametrize("case", BROKEN_SPECS, ids=[case.id for case in BROKEN_SPECS])
def test_a_broken_spec_is_refused_with_the_summaries_of_its_rules(
    control_plane: ControlPlane, case: BrokenSpec
) -> None:
    broken = [rule.summary for rule in OBJECT_RULES if rule.complaint(spec(**case.sections))]
    with pytest.raises(RefusedError) as refusal:
        control_plane.api.create(jobs.path("default", is_tried_only=True), jobs.body(**case.sections))
    assert refusal.value.reason == "Invalid"
    assert [summary for summary in broken if summary not in refusal.value.message] == []
    assert broken


@pytest.mark.parametrize("given", [SFT, GRPO], ids=["sft", "grpo"])
def test_the_defaults_are_those_of_the_models(control_plane: ControlPlane, given: jobs.Body) -> None:
    stored = control_plane.api.create(jobs.path("default", is_tried_only=True), jobs.with_spec(given))
    model = Spec.model_validate_json(jobs.text(given))
    assert stored["spec"] == model.model_dump(mode="json", by_alias=True, exclude_none=True)


# --- unknown fields -------------------------------------------------------------------------------------------------

MISSPELT = jobs.text(jobs.body(parallelism={"tensr": 2}))


def test_an_unknown_field_is_refused_by_name(control_plane: ControlPlane, namespace: str) -> None:
    with pytest.raises(KubectlError, match=r'unknown field "spec\.parallelism\.tensr"'):
        control_plane.kubectl("apply", f"--namespace={namespace}", "-f", "-", stdin=MISSPELT)


def test_an_unknown_field_is_dropped_for_a_client_that_asks_for_less(
    control_plane: ControlPlane, namespace: str
) -> None:
    applying = ("apply", f"--namespace={namespace}", "--validate=false", "-f", "-")
    control_plane.kubectl(*applying, stdin=MISSPELT)
    stored = control_plane.api.get(jobs.path(namespace, "job"))
    assert stored["spec"]["parallelism"] == Parallelism().model_dump(mode="json", by_alias=True, exclude_none=True)


# --- what may change ------------------------------------------------------------------------------------------------

CHANGES: dict[str, Any] = {
    "method": "GRPO",
    "model": {"source": "Qwen/Qwen3-8B"},
    "data": {"maxLength": 2048},
    "parallelism": {"data": 2},
    "training": {"maxSteps": 200},
    "moe": {"freezeRouter": True},
    "memory": {"offloadOptimizer": 0.5},
    "grpo": {"rewards": [{"name": "math"}]},
    "checkpoint": {"everySteps": 10},
    "storage": {"size": "8Ti"},
    "resources": {"gpusPerNode": 4},
    "profile": "shared",
    "podTemplate": {"trainer": {"metadata": {"labels": {"team": "a"}}}},
    "lifecycle": {"gang": "None"},
    "tracking": {"tensorboard": False},
}


@pytest.fixture
def stored_job(control_plane: ControlPlane, namespace: str) -> str:
    """The namespace of a stored job."""
    control_plane.api.create(jobs.path(namespace), jobs.body(model={"revision": "main"}, lifecycle={"queue": "a"}))
    return namespace


def test_every_section_has_a_change() -> None:
    assert list(CHANGES) == [field.alias for field in Spec.model_fields.values()]


@pytest.mark.parametrize("section", CHANGES)
def test_a_change_of_a_section_is_refused(control_plane: ControlPlane, stored_job: str, section: str) -> None:
    with pytest.raises(RefusedError, match=rf"spec\.{section}\S* is immutable; create a new job"):
        control_plane.api.merge(jobs.path(stored_job, "job"), {"spec": {section: CHANGES[section]}})


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"model": {"revision": None}}, id="a field goes"),
        pytest.param({"data": {"chatTemplate": "/template.jinja"}}, id="a field appears"),
        pytest.param({"lifecycle": {"queue": None}}, id="a field of a section that may change in part goes"),
        pytest.param({"training": {"lora": {}}}, id="a section in a section appears"),
    ],
)
def test_an_optional_field_can_neither_go_nor_appear(
    control_plane: ControlPlane, stored_job: str, change: jobs.Body
) -> None:
    with pytest.raises(RefusedError, match="is immutable; create a new job"):
        control_plane.api.merge(jobs.path(stored_job, "job"), {"spec": change})


@pytest.mark.parametrize(
    ("field", "values"),
    [
        ("suspend", [True, False]),
        ("backoffLimit", [0, 9]),
        ("ttlSecondsAfterFinished", [60, 0, None]),
        ("activeDeadlineSeconds", [3600, 7200, None]),
        ("progressDeadlineSeconds", [600]),
    ],
)
def test_some_fields_of_the_lifecycle_may_change(
    control_plane: ControlPlane, stored_job: str, field: str, values: list[Any]
) -> None:
    for value in values:
        job = control_plane.api.merge(jobs.path(stored_job, "job"), {"spec": {"lifecycle": {field: value}}})
        assert job["spec"]["lifecycle"].get(field) == value


# --- what people see ------------------------------------------------------------------------------------------------


def test_explain_says_what_a_field_means(control_plane: ControlPlane) -> None:
    said = control_plane.kubectl("explain", "moetrainingjob.spec.parallelism.tensor")
    assert "FIELD: tensor <integer>" in said
    description = Parallelism.model_fields["tensor"].description
    assert description is not None
    assert description in " ".join(said.split())


STATUS = {
    "phase": "Running",
    "layout": {
        "gpus": 64,
        "nodes": 8,
        "gpusPerPod": 8,
        "tensor": 2,
        "pipeline": 2,
        "virtualPipeline": 1,
        "context": 1,
        "data": 16,
        "expert": 16,
        "expertTensor": 2,
        "expertData": 1,
    },
    "restarts": {"total": 1},
    "why": {"blocker": "NodeLost", "since": "2026-11-27T10:00:00Z", "message": "a", "next": "b", "fix": "c"},
    "display": {
        "step": "120/1000",
        "score": "1.234",
        "evalScore": "0.75",
        "evalLoss": "1.31",
        "speed": "5.1k tok/s/GPU",
        "eta": "3h12m",
    },
}
COLUMNS = """\
NAME   METHOD   PHASE     GPUS   NODES   STEP       SCORE   EVAL   AGE
job    SFT      Running   64     8       120/1000   1.234   0.75   ?
new    SFT                                                         ?
"""
WIDE_COLUMNS = """\
NAME   METHOD   PHASE     GPUS   NODES   STEP       SCORE   EVAL   EVAL LOSS   SPEED            ETA     WHY        RESTARTS   AGE
job    SFT      Running   64     8       120/1000   1.234   0.75   1.31        5.1k tok/s/GPU   3h12m   NodeLost   1          ?
new    SFT                                                                                                                    ?
"""  # noqa: E501  # lines of kubectl are as long as they are


@pytest.mark.parametrize(
    ("options", "expected"),
    [pytest.param([], COLUMNS, id="narrow"), pytest.param(["-o", "wide"], WIDE_COLUMNS, id="wide")],
)
def test_get_prints_the_columns(
    control_plane: ControlPlane, stored_job: str, options: list[str], expected: str
) -> None:
    control_plane.api.create(jobs.path(stored_job), jobs.body("new"))
    control_plane.api.merge(jobs.path(stored_job, "job", part="status"), {"status": STATUS})
    printed = control_plane.kubectl("get", "mtj", f"--namespace={stored_job}", *options)
    assert re.sub(r"\d+s$", "?", printed, flags=re.MULTILINE) == expected


def test_a_write_of_the_status_leaves_the_spec_alone(control_plane: ControlPlane, stored_job: str) -> None:
    change = {"status": {"phase": "Running"}, "spec": {"lifecycle": {"suspend": True}}}
    job = control_plane.api.merge(jobs.path(stored_job, "job", part="status"), change)
    assert (job["status"]["phase"], job["spec"]["lifecycle"]["suspend"]) == ("Running", False)
    assert job["metadata"]["generation"] == 1
