"""Limits of an installation hold where no webhook has seen a job: it gets no pod, and no job that runs is stopped."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest

from fake_world import World
from limit_cases import ALLOWED, BEYOND, LimitCase
from moejob_api.job.status import ConditionType, Phase
from moejob_api.rules.limits import JobLimits
from moejob_operator.validation import Validator, validate_spec

LIMITS = JobLimits.model_validate(ALLOWED)


def limited(limits: JobLimits, **sections: Any) -> World:
    """The world of a job under an operator with limits, after its first reconciles."""
    world = World(validator=Validator(partial(validate_spec, limits=limits)))
    world.apply(**sections)
    world.settle()
    return world


@pytest.mark.parametrize("case", BEYOND, ids=lambda case: case.id)
def test_a_job_beyond_a_limit_that_went_past_the_webhook_has_nothing_created(case: LimitCase) -> None:
    world = limited(LIMITS, **case.sections)
    assert world.condition(ConditionType.ACCEPTED) == "False Limit"
    assert case.says in world.message(ConditionType.ACCEPTED)
    assert [kind for kind, _, _ in world.cluster.objects if kind != "MoETrainingJob"] == []


def test_a_limit_that_comes_later_stops_no_job() -> None:
    world = limited(JobLimits(), resources={"gpusPerNode": 1, "serviceAccount": "admin"})
    world.run()
    world.settle()
    world.validator = Validator(partial(validate_spec, limits=LIMITS))
    world.settle()
    assert world.status.phase is Phase.RUNNING
    assert world.pod_names() == ["0-0", "0-1"]


def test_an_operator_without_limits_refuses_reserved_keys() -> None:
    world = limited(JobLimits(), resources={"gpusPerNode": 1, "labels": {"moejob.dev/index": "7"}})
    assert world.condition(ConditionType.ACCEPTED) == "False Limit"
    assert "moejob.dev/index is reserved" in world.message(ConditionType.ACCEPTED)
