"""Trainer and engines of a job side by side: who waits for whom, in sentences that the times bear out."""

from __future__ import annotations

from typing import Any

import pytest

from builders import moe_model, spec
from moejob_api.hardware import H200
from moejob_api.job import Spec
from moejob_api.layout.sizes import derive_layout
from moejob_api.planner.cost import step_cost
from moejob_api.planner.rollout_plan import RolloutPlan, plan_rollout


def grpo_job(rollout: dict[str, Any], **grpo: Any) -> Spec:
    return spec(
        method="GRPO",
        resources={"gpuType": "H200"},
        parallelism={"expert": 8},
        data={"maxLength": 9216},
        training={"dynamicBatchTokens": 16384},
        grpo={"groupSize": 16, "promptsPerStep": 32, "maxNewTokens": 8192, "rollout": rollout, **grpo},
    )


def planned(job: Spec) -> RolloutPlan:
    plan = plan_rollout(job, moe_model(), derive_layout(job.parallelism, 8))
    assert plan is not None
    return plan


@pytest.mark.parametrize(
    ("rollout", "says"),
    [
        pytest.param({"placement": "Separate", "replicas": 4}, "take turns: the trainer waits 9", id="in turns"),
        pytest.param({"placement": "Colocated"}, "on the same GPUs take turns: the trainer waits", id="on one GPU"),
        pytest.param(
            {"placement": "Colocated", "staleness": 1}, "unfinished answers are carried over", id="on one GPU, ahead"
        ),
        pytest.param(
            {"placement": "Separate", "replicas": 2, "staleness": 2}, "replicas: ", id="the trainer waits for engines"
        ),
        pytest.param(
            {"placement": "Separate", "replicas": 128, "staleness": 1}, "older than staleness 1", id="the longest"
        ),
        pytest.param(
            {"placement": "Separate", "replicas": 256, "staleness": 8},
            "engines wait",
            id="engines wait for the trainer",
        ),
    ],
)
def test_the_plan_says_who_waits_for_whom(rollout: dict[str, Any], says: str) -> None:
    assert says in planned(grpo_job(rollout)).advice[0]


def test_the_replicas_that_the_plan_names_shorten_a_step_as_it_says() -> None:
    rollout = {"placement": "Separate", "replicas": 2, "staleness": 2}
    advice = planned(grpo_job(rollout)).advice[0]
    enough, seconds = advice.rpartition("replicas: ")[2].removesuffix(" s").split(" would shorten it to ")
    fewer, named, most = (
        planned(grpo_job(rollout | {"replicas": count})).current.seconds for count in (int(enough) - 1, int(enough), 16)
    )
    assert f"{named:.1f}" == seconds
    assert named <= 1.05 * most < fewer


def test_the_staleness_that_the_plan_names_gains_what_it_says() -> None:
    advice = planned(grpo_job({"placement": "Separate", "replicas": 8})).advice[1]
    named = int(advice.removeprefix("rollout.staleness: ").split()[0])
    slow, fast = (
        planned(grpo_job({"placement": "Separate", "replicas": 8, "staleness": staleness})).current.seconds
        for staleness in (0, named)
    )
    assert f"{slow / fast:.2f} times as fast ({fast:.1f} s instead of {slow:.1f})" in advice


@pytest.mark.parametrize("placement", ["Separate", "Colocated"])
@pytest.mark.parametrize("staleness", [0, 2])
def test_the_step_of_the_plan_is_that_of_the_search(placement: str, staleness: int) -> None:
    job = grpo_job({"placement": placement, "staleness": staleness})
    cost = step_cost(job, moe_model(), derive_layout(job.parallelism, 8), H200)
    assert planned(job).current.seconds == pytest.approx(cost.seconds)
    assert cost.seconds == pytest.approx(sum(part.seconds for part in cost.parts))


@pytest.mark.parametrize("placement", ["Separate", "Colocated"])
def test_reading_unfinished_answers_again_has_its_price(placement: str) -> None:
    rollout = {"placement": placement, "staleness": 4}
    clear, keep = (
        planned(grpo_job({**rollout, "cacheAcrossVersions": cache})).current.seconds for cache in ("Clear", "Keep")
    )
    # Engines that sleep lose their cache anyway.
    assert clear > keep if placement == "Separate" else clear == keep


def test_a_job_without_answers_or_gpus_has_no_such_plan() -> None:
    sft = spec()
    cpu = spec(method="GRPO", resources={"accelerator": "CPU"})
    for job in (sft, cpu):
        assert plan_rollout(job, moe_model(), derive_layout(job.parallelism, 8)) is None
