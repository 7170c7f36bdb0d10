"""Limits of an installation, in the planner's words. The API server's twin is tested with the chart that holds it."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import ValidationError

from builders import spec
from limit_cases import (
    ALLOWED,
    BEYOND,
    OPEN_KEYS,
    REFUSED_BY_DEFAULT,
    RESERVED_BY_DEFAULT,
    WAYS_ROUND,
    WITHIN,
    LimitCase,
)
from moejob_api.documents import read_file
from moejob_api.problems import Rule
from moejob_api.rules.limits import LIMITED_NAMES, JobLimits, limit_problems, namespace_problems

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("*.yaml"))
LIMITS = JobLimits.model_validate(ALLOWED)


@pytest.mark.parametrize("case", WITHIN, ids=lambda case: case.id)
def test_a_job_within_the_limits_has_no_problem(case: LimitCase) -> None:
    assert list(limit_problems(spec(**case.sections), LIMITS)) == []


@pytest.mark.parametrize("case", BEYOND, ids=lambda case: case.id)
def test_a_job_beyond_a_limit_is_refused_where_it_names_what_it_may_not(case: LimitCase) -> None:
    problems = list(limit_problems(spec(**case.sections), LIMITS))
    assert {(problem.rule, problem.path) for problem in problems} == {(Rule.LIMIT, case.path)}
    assert case.says in " ".join(problem.message for problem in problems)


@pytest.mark.parametrize("limit", [limited.value_name for limited in LIMITED_NAMES])
def test_each_limit_refuses_when_it_is_given_and_only_then(limit: str) -> None:
    """Jobs of WITHIN name something for each limit, those of BEYOND too."""
    none = JobLimits.model_validate({"hostPaths": None, "privileges": None, limit: [], "reserved": []})
    named = [case for case in WITHIN if list(limit_problems(spec(**case.sections), none))]
    assert named
    assert all(
        f"limits.{limit}" in found.message for case in named for found in limit_problems(spec(**case.sections), none)
    )
    no_limits = JobLimits(reserved=(), host_paths=None, privileges=None)
    assert not [case for case in WITHIN if list(limit_problems(spec(**case.sections), no_limits))]


@pytest.mark.parametrize("case", WAYS_ROUND, ids=lambda case: case.id)
def test_no_label_variable_or_gang_says_again_what_a_limit_forbids(case: LimitCase) -> None:
    problems = list(limit_problems(spec(**case.sections), JobLimits.model_validate(OPEN_KEYS)))
    assert {(problem.rule, problem.path) for problem in problems} == {(Rule.LIMIT, case.path)}
    assert case.says in problems[0].message


@pytest.mark.parametrize("case", RESERVED_BY_DEFAULT, ids=lambda case: case.id)
def test_keys_that_schedulers_and_runtimes_read_are_reserved_by_default(case: LimitCase) -> None:
    [problem] = limit_problems(spec(**case.sections), JobLimits())
    assert (problem.path, case.says in problem.message) == (case.path, True)


def test_a_reserved_key_is_allowed_where_its_own_limit_names_it_whole() -> None:
    key = "cluster-autoscaler.kubernetes.io/safe-to-evict"
    job = spec(resources={"annotations": {key: "true"}})
    assert list(limit_problems(job, JobLimits(annotations=(f"{key}*",))))
    assert list(limit_problems(job, JobLimits(labels=(f"{key}=*",))))
    assert list(limit_problems(job, JobLimits(annotations=(f"{key}=*",)))) == []


def test_an_installation_can_require_a_queue() -> None:
    limits = JobLimits(require_queue=True, labels=("*",), reserved=())
    assert list(limit_problems(spec(lifecycle={"queue": "team"}), limits)) == []
    # Another scheduler than the cluster's may read a label: it would satisfy the rule and bind no pod.
    for job in (spec(), spec(resources={"labels": {"runai/queue": "team"}})):
        [problem] = limit_problems(job, limits)
        assert (problem.path, "limits.requireQueue" in problem.message) == ("spec.lifecycle.queue", True)


@pytest.mark.parametrize(
    ("namespace", "is_refused"),
    [("kube-system", True), ("kube-public", True), ("moejob-system", True), ("team", False), ("kubeflow", False)],
)
def test_jobs_are_refused_where_the_operator_does_not_serve(namespace: str, is_refused: bool) -> None:
    limits = JobLimits(unserved_namespaces=("kube-*", "moejob-system"))
    problems = list(namespace_problems(namespace, limits))
    assert bool(problems) is is_refused
    assert all(problem.path == "metadata.namespace" for problem in problems)


def test_by_default_only_reserved_keys_and_labels_without_a_prefix_are_refused() -> None:
    refused = {case.id for case in BEYOND if list(limit_problems(spec(**case.sections), JobLimits()))}
    assert refused == REFUSED_BY_DEFAULT


@pytest.mark.parametrize(
    ("allowed", "refused"),
    [
        pytest.param(["*/*"], {"app"}, id="any with a prefix"),
        pytest.param(["*/*", "app=web"], set(), id="and one without"),
        pytest.param(["*"], set(), id="any at all"),
        pytest.param(["app=*"], {"example.com/a"}, id="one alone"),
    ],
)
def test_labels_without_a_prefix_need_a_limit_that_names_them(allowed: list[str], refused: set[str]) -> None:
    limits = JobLimits.model_validate({"labels": allowed})
    labels = {"app": "web", "example.com/a": "b"}
    found = {key for key in labels if list(limit_problems(spec(resources={"labels": {key: labels[key]}}), limits))}
    assert found == refused


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_within_the_limits_of_an_installation_that_sets_none(example: Path) -> None:
    assert list(limit_problems(read_file(example).spec, JobLimits())) == []


def test_a_refusal_says_what_is_allowed_and_whom_to_ask() -> None:
    (problem,) = limit_problems(spec(resources={"serviceAccount": "admin"}), LIMITS)
    assert problem.message == (
        "service account admin is beyond the limits of this installation, which allow trainer; remove it, or ask those "
        "who run the operator for limits.serviceAccounts"
    )


@pytest.mark.parametrize(
    "wrong",
    [
        pytest.param({"images": ["registry.example.com*"]}, id="an image whose registry could go on"),
        pytest.param({"secrets": ["*/*"]}, id="a prefix of what has none"),
        pytest.param({"labels": None}, id="labels without a limit"),
        pytest.param({"secrets": ["a*b"]}, id="a star in the middle"),
        pytest.param({"secrets": [""]}, id="an empty name"),
        pytest.param({"reserved": ["*"]}, id="every key"),
        pytest.param({"reserved": ["*.k8s.io"]}, id="the end of a prefix without its slash"),
        pytest.param({"nodeSelectors": ["pool"]}, id="a label without its value"),
        pytest.param({"claims": "models"}, id="a word for a list"),
        pytest.param({"image": []}, id="a limit that is not there"),
    ],
)
def test_limits_that_cannot_be_meant_are_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        JobLimits.model_validate(wrong)
