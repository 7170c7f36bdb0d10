"""Seconds of a step with older answers: by hand, and beside a simulation of every answer."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import pytest

from api.planner.cost.simulated_steps import Setting, Simulation
from builders import dense_model, spec
from moejob_api.hardware import H100
from moejob_api.job.grpo import RolloutPlacement
from moejob_api.planner.cost.generation import EngineSpeed, GenerationTime, engine_speed, generation_time
from moejob_api.planner.cost.staleness import staleness_time

SEPARATE, COLOCATED = RolloutPlacement.SEPARATE, RolloutPlacement.COLOCATED
ENGINES = GenerationTime(all_answers=40.0, steady=20.0, longest=30.0, reading=2.0)


@pytest.mark.parametrize(
    ("placement", "staleness", "learning", "seconds"),
    [
        pytest.param(SEPARATE, 0, 10.0, 1 + 40 + 10, id="one after the other"),
        pytest.param(COLOCATED, 0, 10.0, 1 + 40 + 10, id="one after the other on the same GPUs"),
        pytest.param(SEPARATE, 1, 50.0, 1 + 50, id="engines wait for the trainer"),
        pytest.param(SEPARATE, 1, 10.0, 1 + 20 + 2, id="the trainer waits for engines"),
        pytest.param(SEPARATE, 1, 16.0, 1 + (30 + 2 + 16) / 2, id="both wait for the longest answer"),
        pytest.param(COLOCATED, 1, 10.0, 1 + 10 + 20 + 2, id="without the tail of long answers"),
        pytest.param(COLOCATED, 4, 10.0, 1 + 10 + 20 + 2, id="the pace of engines is the least"),
    ],
)
def test_a_step_by_hand(placement: RolloutPlacement, staleness: int, learning: float, seconds: float) -> None:
    step = staleness_time(placement, staleness, 1.0, learning, ENGINES)
    assert step.seconds == pytest.approx(seconds)
    assert step.seconds == pytest.approx(step.sync + step.learning + step.waiting)


def test_idle_shares_by_hand() -> None:
    in_turns, ahead = (staleness_time(SEPARATE, staleness, 1.0, 9.0, ENGINES) for staleness in (0, 1))
    assert (in_turns.trainer_idle_share, in_turns.engine_idle_share) == pytest.approx((40 / 50, 9 / 50))
    # Engines work for 22 of 23 seconds, and stand still for the publication.
    assert (ahead.trainer_idle_share, ahead.engine_idle_share) == pytest.approx((13 / 23, 0))


def engine(answers: int, places: int, group_size: int, longest: int) -> EngineSpeed:
    """An engine of a small model, whose reading hardly depends on the number of answers."""
    job = spec(method="GRPO", resources={"gpuType": "H100"}, data={"maxLength": 8192})
    assert job.grpo is not None
    shape = dense_model(layers=16, heads=16, key_value_heads=4, intermediate=8192)
    speed = engine_speed(job, job.grpo, shape, 1, H100)
    return replace(speed, answers=answers, at_once=places, group_size=group_size, longest_tokens=longest)


@pytest.mark.parametrize("colocated", [False, True], ids=["separate", "colocated"])
@pytest.mark.parametrize("staleness", [0, 1, 2, 4])
@pytest.mark.parametrize(
    ("prompts", "group_size", "places", "learning"),
    [
        pytest.param(8, 8, 64, 2.0, id="engines are slower"),
        pytest.param(8, 8, 64, 12.0, id="the trainer is slower"),
        pytest.param(8, 8, 24, 3.0, id="answers wait for a place"),
        pytest.param(16, 16, 512, 4.0, id="large groups"),
        pytest.param(4, 8, 512, 3.0, id="few answers"),
    ],
)
def test_a_step_takes_what_a_simulation_of_all_answers_takes(
    prompts: int, group_size: int, places: int, learning: float, staleness: int, *, colocated: bool
) -> None:
    speed = engine(prompts * group_size, places, group_size, longest=1000)
    generation = generation_time(speed, staleness, reads_again=False)
    placement = COLOCATED if colocated else SEPARATE
    found = staleness_time(placement, staleness, 0.5, learning, generation).seconds
    setting = Setting(
        staleness, prompts, group_size, 1000, places, learning, 0.5, speed.round_seconds, colocated=colocated
    )
    assert found == pytest.approx(Simulation(setting).step_seconds(), rel=0.2)


def test_answers_are_a_third_as_long_as_they_may_be() -> None:
    # The mean of an exponential of mean 1/3 that is cut off at 1, and of the longest of two.
    one = (1 - exp(-3)) / 3
    two = 2 * one - (1 - exp(-6)) / 6
    speed = engine(64, 64, 2, longest=3000)
    assert speed.mean_tokens == pytest.approx(3000 * one)
    assert speed.group_tokens == pytest.approx(3000 * two, rel=1e-9)


def test_older_answers_never_make_a_step_longer() -> None:
    for places in (8, 64, 512):
        speed = engine(256, places, 8, longest=4096)
        for placement in RolloutPlacement:
            for learning in (0.1, 3.0, 30.0, 300.0):
                seconds = [
                    staleness_time(
                        placement, staleness, 1.0, learning, generation_time(speed, staleness, reads_again=False)
                    ).seconds
                    for staleness in (0, 1, 2, 4, 8)
                ]
                assert seconds == sorted(seconds, reverse=True)
