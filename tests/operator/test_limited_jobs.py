"""Limits of an installation hold where no webhook has seen a job: it gets no pod, and no job that runs is stopped."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from builders import SFT, merge_sections
from fake_world import KEY, World
from limit_cases import ALLOWED, BEYOND, OPEN_KEYS, RESERVED_BY_DEFAULT, WAYS_ROUND, LimitCase
from moejob_api.job.status import ConditionType, Phase
from moejob_api.profiles.fields import ProfileKind
from moejob_api.profiles.reading import TrainingProfile
from moejob_api.rules.limits import JobLimits
from moejob_operator.admission.profiled_jobs import merge_review
from moejob_operator.admission.review import review_job
from moejob_operator.children.gangs import GangApi
from moejob_operator.validation import Validator, validate_spec
from network_fragments import CLOSED, FRAGMENTS, NetworkFragment

LIMITS = JobLimits.model_validate(ALLOWED)
# Every way past a limit, with the limits that have to hold it.
REFUSALS = [
    pytest.param(limits, case, id=f"{name}-{case.id}")
    for name, limits, cases in (
        ("limited", LIMITS, BEYOND),
        ("open keys", JobLimits.model_validate(OPEN_KEYS), WAYS_ROUND),
        ("defaults", JobLimits(), RESERVED_BY_DEFAULT),
    )
    for case in cases
]


def body(**sections: Any) -> dict[str, Any]:
    """A job as the API server sends it for review."""
    metadata = {"name": KEY.name, "namespace": KEY.namespace}
    spec = merge_sections(SFT, sections)
    return {"apiVersion": "moejob.dev/v1alpha1", "kind": "MoETrainingJob", "metadata": metadata, "spec": spec}


def limited(limits: JobLimits, **sections: Any) -> World:
    """The world of a job under an operator with limits, after its first reconciles."""
    world = World(validator=Validator(partial(validate_spec, limits=limits), limits))
    world.apply(**sections)
    world.settle()
    return world


@pytest.mark.parametrize(("limits", "case"), REFUSALS)
def test_a_job_beyond_a_limit_that_went_past_the_webhook_has_nothing_created(
    limits: JobLimits, case: LimitCase
) -> None:
    world = limited(limits, **case.sections)
    assert world.condition(ConditionType.ACCEPTED) == "False Limit"
    assert case.says in world.message(ConditionType.ACCEPTED)
    assert [kind for kind, _, _ in world.cluster.objects if kind != "MoETrainingJob"] == []


@pytest.mark.parametrize(("limits", "case"), REFUSALS)
def test_the_webhook_denies_a_job_beyond_a_limit_by_the_field_that_goes_beyond(
    limits: JobLimits, case: LimitCase
) -> None:
    validation = review_job("CREATE", None, body(**case.sections), limits)
    assert case.says in validation.refusal_text
    assert case.path in {problem.path for problem in validation.problems}


# The same names, in a profile where a profile can hold them. An image of engines is left out: these jobs have none.
PROFILED = [
    pytest.param(*case.values, id=case.id)
    for case in REFUSALS
    if isinstance(case.values[1], LimitCase)
    and case.values[1].split_by_profile()[0]
    and case.values[1].id != "image of engines"
]


def test_most_ways_past_a_limit_are_tried_by_a_profile_too() -> None:
    assert len(PROFILED) > 0.9 * len(REFUSALS)


@pytest.mark.parametrize("kind", ProfileKind)
@pytest.mark.parametrize(("limits", "case"), PROFILED)
def test_a_profile_is_no_way_round_a_limit(kind: ProfileKind, limits: JobLimits, case: LimitCase) -> None:
    profile, sections = case.split_by_profile()
    world = World(validator=Validator(partial(validate_spec, limits=limits), limits))
    world.cluster.give_profile(kind, "beyond", profile)
    world.apply(profile="beyond", **sections)
    world.settle()
    assert world.condition(ConditionType.ACCEPTED) == "False Limit"
    assert case.says in world.message(ConditionType.ACCEPTED)
    assert [name for name, _, _ in world.cluster.objects if name != "MoETrainingJob"] == []
    assert world.status.profile is None


@pytest.mark.parametrize(("limits", "case"), PROFILED)
def test_the_webhook_denies_a_job_that_its_profile_leads_beyond_a_limit(limits: JobLimits, case: LimitCase) -> None:
    profile, sections = case.split_by_profile()
    found = TrainingProfile(ProfileKind.CLUSTER, "beyond", profile)
    merged = merge_review(None, body(profile="beyond", **sections), lambda *_: found)
    validation = review_job("CREATE", merged.old, merged.new, limits)
    assert case.says in validation.refusal_text
    assert case.path in {problem.path for problem in validation.problems}


def test_a_profile_gives_the_queue_that_each_job_has_to_name() -> None:
    limits = JobLimits(require_queue=True)
    world = World(
        validator=Validator(partial(validate_spec, limits=limits), limits), gang_apis=frozenset({GangApi.KUEUE})
    )
    world.cluster.give_profile(ProfileKind.NAMESPACED, "queued", {"lifecycle": {"queue": "team"}})
    world.apply(profile="queued")
    world.settle()
    assert world.condition(ConditionType.ACCEPTED) == "True Accepted"


def test_webhook_and_reconciler_refuse_a_job_in_a_namespace_that_is_not_served() -> None:
    limits = JobLimits(unserved_namespaces=("kube-*", "team"))
    validation = review_job("CREATE", None, body(), limits)
    assert "jobs in the namespace team are not served here (kube-*, team)" in validation.refusal_text
    world = limited(limits)
    assert world.condition(ConditionType.ACCEPTED) == "False Limit"
    assert [kind for kind, _, _ in world.cluster.objects if kind != "MoETrainingJob"] == []


def test_a_namespace_that_is_served_no_more_keeps_its_jobs() -> None:
    world = limited(JobLimits(), resources={"gpusPerNode": 1})
    world.run()
    world.settle()
    world.validator = Validator(limits=JobLimits(unserved_namespaces=("team",)))
    world.settle()
    assert world.status.phase is Phase.RUNNING
    assert world.pod_names() == ["0-0", "0-1"]


def test_an_installation_that_requires_a_queue_gives_no_pod_to_a_job_without_one() -> None:
    limits = JobLimits(require_queue=True)
    assert "limits.requireQueue" in review_job("CREATE", None, body(), limits).refusal_text
    world = limited(limits)
    assert world.condition(ConditionType.ACCEPTED) == "False Limit"


def test_a_limit_that_comes_later_stops_no_job() -> None:
    world = limited(JobLimits(), resources={"gpusPerNode": 1, "serviceAccount": "admin"})
    world.run()
    world.settle()
    world.validator = Validator(partial(validate_spec, limits=LIMITS))
    world.settle()
    assert world.status.phase is Phase.RUNNING
    assert world.pod_names() == ["0-0", "0-1"]


@pytest.mark.parametrize("fragment", FRAGMENTS, ids=lambda fragment: fragment.name)
def test_webhook_and_reconciler_take_the_network_of_a_cloud_within_the_limits_that_it_names_only(
    fragment: NetworkFragment,
) -> None:
    closed, opened = JobLimits.model_validate(CLOSED), JobLimits.model_validate(fragment.limits)
    job = merge_sections(
        fragment.sections, {"parallelism": {"tensor": 4, "expert": 2}, "resources": {"gpusPerNode": 8}}
    )
    assert "limits" in review_job("CREATE", None, body(**job), closed).refusal_text
    assert limited(closed, **job).condition(ConditionType.ACCEPTED) == "False Limit"
    assert review_job("CREATE", None, body(**job), opened).refusal_text == ""
    assert limited(opened, **job).condition(ConditionType.ACCEPTED) == "True Accepted"


def test_an_operator_without_limits_refuses_reserved_keys() -> None:
    world = limited(JobLimits(), resources={"gpusPerNode": 1, "labels": {"moejob.dev/index": "7"}})
    assert world.condition(ConditionType.ACCEPTED) == "False Limit"
    assert "moejob.dev/index is reserved" in world.message(ConditionType.ACCEPTED)
