"""Ten thousand jobs that went past every check but the CRD's own schema: each is answered, none breaks anything.

The usual run takes every fifth of them; HYPOTHESIS_PROFILE=explore takes all.
"""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from any_job import AnyJob
from fake_world import World
from moejob_api.job import Spec
from moejob_api.job.status import ConditionStatus, ConditionType
from moejob_operator.actions import Kind
from moejob_operator.planning.objects import CREATED_AT_ONCE
from moejob_operator.validation import MOST_PODS, Validation, Validator, validate_spec

SEEDS = 100
JOBS_OF_A_SEED = 100 if os.environ.get("HYPOTHESIS_PROFILE") == "explore" else 20
# Beyond this FakeCluster is slower than what it stands for.
FEW_PODS = 64


@pytest.mark.parametrize("seed", range(SEEDS))
def test_a_job_of_any_spec_is_judged_and_either_refused_in_words_or_created(seed: int) -> None:
    drawn = AnyJob(seed)
    for _ in range(JOBS_OF_A_SEED):
        spec = drawn.spec()
        world = looked_at(spec, status=None)
        assert_answered(world, spec)


@pytest.mark.parametrize("seed", range(0, SEEDS, 5))
def test_a_job_of_any_spec_and_any_status_is_looked_at_without_an_error(seed: int) -> None:
    drawn = AnyJob(1000 + seed)
    for _ in range(JOBS_OF_A_SEED):
        looked_at(drawn.spec(), drawn.status())


def looked_at(spec: dict[str, Any], status: dict[str, Any] | None) -> World:
    """The world of such a job after a few looks."""
    world = World()
    world.validator = Validator(small)
    world.apply_spec(spec)
    if status is not None:
        world.cluster.store_changed(world.job | {"status": status})
    for _ in range(3):
        world.reconcile()
        if world.is_gone:
            break
    return world


def small(spec: Spec) -> Validation:
    """The real answer; gangs that are too large for a fake cluster get a layout of one pod."""
    found = validate_spec(spec)
    if found.layout is None or found.layout.nodes <= FEW_PODS:
        return found
    return replace(found, layout=replace(found.layout, nodes=1), rollout=None)


def assert_answered(world: World, spec: dict[str, Any]) -> None:
    """Refused with a reason and nothing created, or accepted."""
    found = next(said for said in world.status.conditions if said.type is ConditionType.ACCEPTED)
    if found.status is ConditionStatus.TRUE:
        return
    assert found.message, spec
    assert {kind for kind, _, _ in world.cluster.objects} == {Kind.JOB}, spec


# --- large ones -------------------------------------------------------------------------------------------------------


def test_a_large_gang_is_created_in_several_looks_so_that_other_jobs_need_not_wait() -> None:
    world = World()
    world.apply(parallelism={"data": 1200}, training={"globalBatchSize": 1200})
    counts = []
    for _ in range(3):
        again = world.reconcile()
        counts.append((len(world.pod_names()), again))
    # The Service, the claim and the Secret are made in the first look.
    assert counts == [(CREATED_AT_ONCE - 3, 0.0), (2 * CREATED_AT_ONCE - 3, 0.0), (1200, None)]
    assert world.condition(ConditionType.PODS_CREATED) == "True AllPodsExist"


def test_a_job_of_more_pods_than_can_be_looked_after_is_refused() -> None:
    world = World()
    world.apply(parallelism={"data": 65_536}, training={"globalBatchSize": 65_536})
    world.settle()
    assert world.pod_names() == []
    assert f"the job needs 65536 pods, of which {MOST_PODS} at most" in world.message(ConditionType.ACCEPTED)
