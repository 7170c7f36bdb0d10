"""The CRD and jobs as the API server itself takes them. Its own code answers: nothing here is a stand-in."""

from __future__ import annotations

import json
from typing import Any

import pytest

from api_server import Answer, ApiServer, Body, job_body
from broken_specs import BROKEN_SPECS
from builders import GRPO, SFT, merge_sections, spec
from moejob_api.crd.policy import SEPARATOR, refusal_message
from moejob_api.documents import parse_job
from moejob_api.job import MoETrainingJob, Spec
from moejob_api.rules.object_rules import OBJECT_RULES

# Every optional section, with nothing in it that could be left out: what is inside must come by itself.
SPARSE: Body = merge_sections(
    GRPO,
    {
        "training": {"optimizer": {}, "lora": {}},
        "grpo": {"kl": {}, "rollout": {"placement": "Separate"}},
        "resources": {
            "env": [{"name": "A", "secret": {"name": "s", "key": "k"}}],
            "tolerations": [{"operator": "Exists"}],
            "rdma": {"resource": "rdma/hca"},
        },
        "tracking": {"wandb": {"project": "p"}, "mlflow": {"trackingUri": "http://mlflow"}, "trackio": {}},
    },
)


def test_the_definition_is_accepted(api_server: ApiServer) -> None:
    assert api_server.refusals_of_definition == ()


@pytest.mark.parametrize("given", [SFT, GRPO, SPARSE], ids=["sft", "grpo", "sparse"])
def test_defaults_are_those_of_the_models(api_server: ApiServer, given: Body) -> None:
    [answer] = api_server.create_objects(job_body(given))
    model = Spec.model_validate_json(json.dumps(given))
    assert answer.errors == answer.unknown == ()
    assert answer.stored["spec"] == model.model_dump(mode="json", by_alias=True, exclude_none=True)


def test_a_stored_job_is_read_as_what_was_written(api_server: ApiServer) -> None:
    bodies = [job_body(given) for given in (SFT, GRPO, SPARSE)]
    for body, answer in zip(bodies, api_server.create_objects(*bodies), strict=True):
        assert parse_job(answer.stored).spec == parse_job(body).spec


def test_every_broken_spec_is_refused_with_the_summaries_of_the_rules_it_breaks(api_server: ApiServer) -> None:
    models = [spec(**case.sections) for case in BROKEN_SPECS]
    answers = api_server.create_objects(*(job_body(_body(model)) for model in models))
    for case, model, answer in zip(BROKEN_SPECS, models, answers, strict=True):
        broken = SEPARATOR.join(refusal_message(rule) for rule in OBJECT_RULES if rule.complaint(model))
        assert answer.errors == ((f"policy: {broken}",) if broken else ()), case.id


def test_the_longest_lists_are_within_the_budget_of_the_policy(api_server: ApiServer) -> None:
    lists = {
        "data": {name: [{"source": f"/{n}", "format": "Chat"} for n in range(64)] for name in ("train", "eval")},
        "resources": {
            "env": [{"name": f"A{number}", "value": "v" * 1000} for number in range(256)],
            "envFrom": [{"secret": f"s{number}"} for number in range(32)],
            "tolerations": [{"operator": "Exists", "key": f"k{number}"} for number in range(64)],
        },
    }
    new = job_body(merge_sections(SFT, lists))
    suspended = job_body(merge_sections(merge_sections(SFT, lists), {"lifecycle": {"suspend": True}}))
    assert [
        answer.errors for answer in (*api_server.create_objects(new), *api_server.replace_objects((suspended, new)))
    ] == [(), ()]


def test_a_job_that_older_rules_took_keeps_its_labels_changeable(api_server: ApiServer) -> None:
    broken = merge_sections(SFT, {"training": {"epochs": 1}})
    [labelled, changed] = api_server.replace_objects(
        (job_body(broken), job_body(broken, labels={"team": "a"})),
        (job_body(broken), job_body(merge_sections(broken, {"lifecycle": {"suspend": True}}))),
    )
    assert labelled.errors == ()
    assert "exactly one of maxSteps and epochs" in " ".join(changed.errors)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        pytest.param("a" * 40, None, id="the longest name"),
        pytest.param("a" * 41, "more than 40 characters", id="one too long"),
        pytest.param("1a", "beginning with a letter", id="a digit in front"),
        pytest.param("a.b", "lower-case letters, digits and '-'", id="a dot"),
    ],
)
def test_names_are_checked(api_server: ApiServer, name: str, says: str | None) -> None:
    [answer] = api_server.create_objects(job_body(SFT, name))
    assert (says is None and answer.errors == ()) or (says is not None and says in " ".join(answer.errors))


# --- what may change ------------------------------------------------------------------------------------------------

FULL = merge_sections(
    SPARSE,
    {
        "lifecycle": {"queue": "q"},
        "checkpoint": {"everySteps": 10},
        "moe": {"freezeRouter": True},
        "memory": {"sharding": "DistributedOptimizer"},
    },
)


@pytest.mark.parametrize(
    ("old", "change", "named"),
    [
        pytest.param(SFT, {"method": "GRPO"}, "spec.method", id="another method"),
        pytest.param(SFT, {"model": {"revision": "main"}}, "spec.model", id="an optional field of a section appears"),
        pytest.param(SFT, {"data": {"train": []}}, "spec.data", id="data"),
        pytest.param(SFT, {"parallelism": {"tensor": 2}}, "spec.parallelism", id="a default is replaced"),
        pytest.param(SFT, {"training": {"maxSteps": 101}}, "spec.training", id="length"),
        pytest.param(GRPO, {"grpo": {"groupSize": 4}}, "spec.grpo", id="inside an optional section"),
        pytest.param(GRPO, {"grpo": None}, "spec.grpo", id="an optional section goes"),
        pytest.param(SFT, {"grpo": {"rewards": [{"name": "math"}]}}, "spec.grpo", id="an optional section appears"),
        pytest.param(FULL, {"moe": {"freezeRouter": None}}, "spec.moe", id="an optional field goes"),
        pytest.param(FULL, {"checkpoint": {"everySteps": 11}}, "spec.checkpoint", id="checkpoints"),
        pytest.param(SFT, {"memory": {"offloadOptimizer": 0.5}}, "spec.memory", id="memory"),
        pytest.param(SFT, {"storage": {"size": "8Ti"}}, "spec.storage", id="storage"),
        pytest.param(SFT, {"resources": {"image": "other"}}, "spec.resources", id="resources"),
        pytest.param(FULL, {"tracking": {"wandb": None}}, "spec.tracking", id="tracking"),
        pytest.param(SFT, {"lifecycle": {"gang": "None"}}, "spec.lifecycle.gang", id="gang"),
        pytest.param(SFT, {"lifecycle": {"queue": "q"}}, "spec.lifecycle.queue", id="a queue appears"),
        pytest.param(FULL, {"lifecycle": {"queue": None}}, "spec.lifecycle.queue", id="a queue goes"),
        pytest.param(FULL, {"lifecycle": {"queue": "other"}}, "spec.lifecycle.queue", id="another queue"),
    ],
)
def test_a_change_is_refused_by_the_section_it_is_in(
    api_server: ApiServer, old: Body, change: Body, named: str
) -> None:
    [answer] = api_server.replace_objects((job_body(old), job_body(merge_sections(old, change))))
    refused = f"policy: {named} is immutable; create a new job"
    # An empty list of data is refused before any rule is asked.
    assert any(error.startswith((refused, f"{named}.")) for error in answer.errors)


def test_whoever_wants_another_layout_is_told_how_to_go_on_in_it(api_server: ApiServer) -> None:
    [answer] = api_server.replace_objects(
        (job_body(SFT), job_body(merge_sections(SFT, {"parallelism": {"tensor": 2}})))
    )
    assert any(
        "checkpoint.resumeFrom names this one, with resume: Run, to go on in it" in said for said in answer.errors
    )


@pytest.mark.parametrize("section", sorted(FULL))
def test_setting_a_section_to_null_first_does_not_get_past_immutability(api_server: ApiServer, section: str) -> None:
    body = job_body(FULL)
    [answer] = api_server.replace_objects((body, job_body({**FULL, section: None})))
    # What has defaults comes back as them, what is required is missed: in no case is the section simply gone.
    refused = (f"spec.{section}", f"policy: spec.{section}")
    assert any(error.startswith(refused) for error in answer.errors) or _sections(answer) == _sections(
        *api_server.create_objects(body)
    )


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"suspend": True}, id="suspend"),
        pytest.param({"backoffLimit": 0}, id="backoffLimit"),
        pytest.param({"ttlSecondsAfterFinished": 60}, id="ttlSecondsAfterFinished appears"),
        pytest.param({"activeDeadlineSeconds": 60}, id="activeDeadlineSeconds appears"),
        pytest.param({"progressDeadlineSeconds": 60}, id="progressDeadlineSeconds"),
    ],
)
def test_the_life_of_a_job_may_be_changed_and_changed_back(api_server: ApiServer, change: Body) -> None:
    before, after = job_body(FULL), job_body(merge_sections(FULL, {"lifecycle": change}))
    assert [answer.errors for answer in api_server.replace_objects((before, after), (after, before))] == [(), ()]


def test_writing_a_default_out_changes_nothing(api_server: ApiServer) -> None:
    defaults = Spec.model_validate_json(json.dumps(FULL)).model_dump(mode="json", by_alias=True, exclude_none=True)
    [answer] = api_server.replace_objects((job_body(FULL), job_body(defaults)))
    assert answer.errors == ()


# --- status ---------------------------------------------------------------------------------------------------------

STATUS: Body = {
    "phase": "Running",
    "conditions": [
        {"type": "Accepted", "status": "True", "reason": "Valid", "lastTransitionTime": "2025-01-01T00:00:00Z"}
    ],
    "layout": {
        "gpus": 16,
        "nodes": 2,
        "gpusPerPod": 8,
        "tensor": 4,
        "pipeline": 1,
        "virtualPipeline": 1,
        "context": 1,
        "data": 4,
        "expert": 4,
        "expertTensor": 1,
        "expertData": 4,
        "memoryPerGpuBytes": 80 * 2**30,
    },
    "replicaStatuses": [{"role": "trainer", "desired": 2}],
    "progress": {"step": 7, "loss": 1.5, "updatedAt": "2025-01-01T00:00:00Z"},
    "display": {
        "step": "7/100",
        "score": "1.500",
        "evalScore": "0.25",
        "evalLoss": "1.75",
        "speed": "2.1k",
        "eta": "1h",
    },
    "restarts": {"total": 3},
    "why": {"blocker": "NodeLost", "since": "2030-01-01T00:00:00Z", "message": "m", "next": "n", "fix": "f"},
}


def test_a_status_is_stored_with_the_models_defaults_and_shown_in_columns(api_server: ApiServer) -> None:
    old = job_body(SFT)
    [answer] = api_server.replace_objects((old, {**old, "status": STATUS}), verb="updateStatus")
    model = parse_job({**old, "status": STATUS}).status
    assert answer.errors == ()
    assert model is not None
    assert answer.stored["status"] == model.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert answer.cells[:-1] == (
        "job",
        "SFT",
        "Running",
        16,
        2,
        "7/100",
        "1.500",
        "0.25",
        "1.75",
        "2.1k",
        "1h",
        "NodeLost",
        3,
    )


def test_a_job_without_status_prints_empty_columns(api_server: ApiServer) -> None:
    [answer] = api_server.create_objects(job_body(SFT))
    assert answer.cells[:4] == ("job", "SFT", None, None)


def test_a_user_cannot_write_the_status_nor_the_operator_the_spec(api_server: ApiServer) -> None:
    old = job_body(SFT)
    [created] = api_server.create_objects({**old, "status": STATUS})
    [written] = api_server.replace_objects((old, job_body(GRPO)), verb="updateStatus")
    assert "status" not in created.stored
    assert written.stored["spec"]["method"] == "SFT"


@pytest.mark.parametrize(
    "status",
    [
        pytest.param({"phase": "Sleeping"}, id="unknown phase"),
        pytest.param({"attempt": -1}, id="negative attempt"),
        pytest.param({"conditions": [*STATUS["conditions"], *STATUS["conditions"]]}, id="a condition twice"),
    ],
)
def test_a_status_that_the_model_has_no_words_for_is_refused(api_server: ApiServer, status: Body) -> None:
    old = job_body(SFT)
    [answer] = api_server.replace_objects((old, {**old, "status": status}), verb="updateStatus")
    assert any(error.startswith("status") for error in answer.errors)


def test_an_environment_variable_given_twice_is_refused(api_server: ApiServer) -> None:
    twice = merge_sections(SFT, {"resources": {"env": [{"name": "A", "value": "1"}, {"name": "A", "value": "2"}]}})
    [answer] = api_server.create_objects(job_body(twice))
    assert "spec.resources.env[1]: Duplicate value" in " ".join(answer.errors)


def _body(model: Spec) -> Body:
    body: Body = model.model_dump(mode="json", by_alias=True, exclude_none=True)
    return body


def _sections(answer: Answer) -> Any:
    return MoETrainingJob.model_validate_json(json.dumps({**answer.stored, "status": None})).spec
