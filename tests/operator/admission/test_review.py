"""The webhook's verdicts: every kind of job, and any JSON at all."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from builders import SFT, merge_sections
from calls import count_calls
from moejob_operator.admission.review import ReviewTurns, denial_status, review_job, shown_warnings, validate_raw_job


def body(name: str = "job", **sections: Any) -> dict[str, Any]:
    """A job as the API server hands it over, defaults not filled in."""
    return {
        "apiVersion": "moejob.dev/v1alpha1",
        "kind": "MoETrainingJob",
        "metadata": {"name": name, "namespace": "default", "uid": "1", "managedFields": [{"fieldsV1": {}}]},
        "spec": merge_sections(SFT, sections),
    }


def response(new: object, old: object = None, operation: str = "CREATE") -> dict[str, Any]:
    """Return what is said of a request, as an AdmissionReview puts it."""
    found = review_job(operation, old, new)
    said: dict[str, Any] = {"allowed": not found.problems}
    if found.problems:
        said["status"] = denial_status(found)
    return said | ({"warnings": shown_warnings(found)} if shown_warnings(found) else {})


# Two GPUs hold no model of 30 B parameters.
FITTING: dict[str, Any] = {
    "parallelism": {"tensor": 4, "expert": 4},
    "resources": {"gpusPerNode": 8, "gpuType": "H100"},
    "storage": {"accessModes": ["ReadWriteMany"]},
}
TOO_LARGE: dict[str, Any] = merge_sections(
    FITTING, {"parallelism": {"tensor": 2, "expert": 1}, "resources": {"gpusPerNode": 2}}
)
NO_LAYOUT: dict[str, Any] = merge_sections(FITTING, {"parallelism": {"tensor": 3}})


# --- verdicts -------------------------------------------------------------------------------------------------------


def test_a_job_that_can_work_is_allowed_without_a_word() -> None:
    assert response(body(**FITTING)) == {"allowed": True}


@pytest.mark.parametrize(
    ("job", "says"),
    [
        pytest.param(body(**NO_LAYOUT), ["spec.parallelism", "tensor 3"], id="a layout that cannot be"),
        pytest.param(body(**TOO_LARGE), ["spec.parallelism: a GPU", "GiB", "What would be accepted"], id="too large"),
        pytest.param(
            body(parallelism={"tensr": 4}), ["spec.parallelism.tensr", 'did you mean "tensor"'], id="misspelt"
        ),
        pytest.param(body(training={"maxSteps": "ten"}), ["spec.training.maxSteps"], id="the wrong type"),
        pytest.param(body(model={"source": "no model"}), ["spec.model.source"], id="a model that has no name"),
        pytest.param(body("J" * 50), ["metadata.name"], id="a name that no pod can have"),
        pytest.param(body() | {"spec": None}, ["spec"], id="no spec"),
        pytest.param({}, ["kind: is missing"], id="an empty object"),
        pytest.param(None, ["is no object"], id="nothing"),
    ],
)
def test_a_denial_says_where_and_why(job: object, says: list[str]) -> None:
    said = response(job)
    assert said["allowed"] is False
    assert [piece for piece in says if piece not in said["status"]["message"]] == []


UNEVEN_STAGES = merge_sections(SFT, {"parallelism": {"pipeline": 7}, "resources": {"gpusPerNode": 1, "gpuType": None}})


@pytest.mark.parametrize(
    "refused",
    [
        pytest.param(merge_sections(SFT, TOO_LARGE), id="too large"),
        pytest.param(merge_sections(SFT, NO_LAYOUT), id="no layout"),
        pytest.param(UNEVEN_STAGES, id="stages that are even only with the ends counted"),
    ],
)
def test_what_is_suggested_is_accepted_as_it_is_printed(refused: dict[str, Any]) -> None:
    message = response(body() | {"spec": refused})["status"]["message"]
    printed = re.findall(r"(parallelism: \{.*?\}) on (\d+) GPUs", message)
    assert len(printed) >= 3
    for layout, gpus in printed:
        found = validate_raw_job(body() | {"spec": refused | yaml.safe_load(layout)})
        assert found.problems == ()
        assert found.layout is not None
        assert found.layout.gpus == int(gpus)
        assert not re.search("True|False", layout), "as people write YAML"


def test_a_job_that_can_work_waits_for_no_search_and_one_that_cannot_only_for_a_while() -> None:
    turns = ReviewTurns(search_seconds=0.01)
    with turns.search:
        assert review_job("CREATE", None, body(**FITTING), turns=turns).problems == ()
        refused = review_job("CREATE", None, body(**NO_LAYOUT), turns=turns)
    assert (bool(refused.problems), refused.suggestions) == (True, ())
    assert review_job("CREATE", None, body(**NO_LAYOUT), turns=turns).suggestions


def test_an_update_takes_the_work_of_one_search_for_layouts() -> None:
    """Of the old job only its problems matter: looking for layouts for it too would double what a stranger can ask."""
    sizes = {"tensor": 60, "pipeline": 12, "context": 7, "data": 24, "expertLayout": "Folded"}
    hostile: dict[str, Any] = {"parallelism": sizes, "resources": {"gpusPerNode": 60}}
    old = body(**merge_sections(hostile, {"training": {"globalBatchSize": 360_360}}))
    new = body(**merge_sections(hostile, {"training": {"globalBatchSize": 720_720}}))
    created = count_calls(lambda: review_job("CREATE", None, new))
    assert count_calls(lambda: review_job("UPDATE", old, new)) < 1.2 * created


def test_a_denial_tells_programs_the_fields() -> None:
    causes = response(body(training={"maxSteps": "ten"}, parallelism={"tensr": 4}))["status"]["details"]["causes"]
    assert {cause["field"] for cause in causes} == {"spec.training.maxSteps", "spec.parallelism.tensr"}
    assert all(cause["message"] for cause in causes)


def test_kubectl_shows_the_whole_message_and_the_name_of_the_webhook() -> None:
    """Of a refusal with code 422 and causes it would print the causes alone."""
    status = response(body(**NO_LAYOUT))["status"]
    assert (status["code"], status["reason"]) == (403, "Forbidden")


def test_a_model_that_cannot_be_seen_is_allowed_with_a_warning() -> None:
    said = response(body(model={"source": "pvc://models/mine"}, **FITTING))
    assert said["allowed"] is True
    assert any("spec.model.source: not checked" in warning for warning in said["warnings"])


def test_a_path_in_a_job_is_not_looked_up_on_the_disk_of_the_operator() -> None:
    said = response(body(model={"source": "/etc"}, **FITTING))
    assert said["allowed"] is True
    assert any("another machine" in warning for warning in said["warnings"])


def test_what_is_unwise_is_allowed_with_a_warning() -> None:
    said = response(body(data={"maxLength": 999_936}, **merge_sections(FITTING, {"resources": {"gpuType": None}})))
    assert any(warning.startswith("spec.data.maxLength: ") for warning in said["warnings"])
    assert all(len(warning) <= 256 for warning in said["warnings"])


# --- updates --------------------------------------------------------------------------------------------------------


def changed(job: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return job | {"spec": merge_sections(job["spec"], sections)}


REFUSED = body(**NO_LAYOUT)


@pytest.mark.parametrize(
    ("old", "new", "operation", "allowed"),
    [
        pytest.param(REFUSED, REFUSED | {"status": {"phase": "Failed"}}, "UPDATE", True, id="only the status changes"),
        pytest.param(
            REFUSED, REFUSED | {"metadata": {"labels": {"a": "b"}}}, "UPDATE", True, id="only a label changes"
        ),
        pytest.param(
            REFUSED, changed(REFUSED, lifecycle={"suspend": True}), "UPDATE", True, id="an old job is suspended"
        ),
        pytest.param(REFUSED, changed(REFUSED, training={"maxSteps": 0}), "UPDATE", False, id="an old job gets worse"),
        pytest.param(body(**FITTING), REFUSED, "UPDATE", False, id="a good job turns bad"),
        pytest.param(REFUSED, body(**FITTING), "UPDATE", True, id="a bad job is mended"),
        pytest.param(None, REFUSED, "UPDATE", False, id="an update that does not say of what"),
        pytest.param(REFUSED, None, "DELETE", True, id="a job is deleted"),
        pytest.param({"spec": 1}, {"metadata": 1}, "UPDATE", True, id="no more senseless than it was"),
    ],
)
def test_an_update_is_judged_by_what_it_changes(old: object, new: object, operation: str, allowed: bool) -> None:
    assert response(new, old, operation)["allowed"] is allowed


# --- anything -------------------------------------------------------------------------------------------------------

LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
JSON = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=12), inner, max_size=4)
)
FIELDS = st.sampled_from(["spec", "metadata", "kind", "apiVersion", "status", "name", "model", "data", "parallelism"])
JOBS = st.dictionaries(FIELDS, JSON, max_size=6)


@st.composite
def nearly_jobs(draw: st.DrawFn) -> Any:
    """A good job with one value somewhere in it replaced by any other."""
    job = json.loads(json.dumps(body(**FITTING)))
    place = job
    while True:
        key = draw(st.sampled_from(sorted(place)))
        if not isinstance(place[key], dict) or not place[key] or draw(st.booleans()):
            place[key] = draw(JSON)
            return job
        place = place[key]


@given(
    new=JSON | JOBS | nearly_jobs(),
    old=st.none() | JOBS | nearly_jobs(),
    operation=st.sampled_from(["CREATE", "UPDATE"]),
)
def test_no_object_whatever_makes_the_webhook_fail(new: object, old: object, operation: str) -> None:
    json.dumps(response(new, old, operation))
