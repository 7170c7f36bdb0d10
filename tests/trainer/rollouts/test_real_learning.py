"""GRPO learns sums beside vLLM, with answers of any age and engines in either place.

A table of the steps to the goal: `make test-learning-vllm`.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from builders import merge_sections
from engines import SECRET, Engine
from moejob_api.contract.pods import Environment
from moejob_api.job.grpo import RolloutPlacement
from trainer.objectives.grpo.learning import make_job_spec, taught
from trainer.parity.matrix import MATRIX, Entry
from trainer.runs import Runs

IS_FULL = os.environ.get("MOEJOB_LEARNING") == "full"
SEEDS = (1, 2, 3) if IS_FULL else (1,)
# Without older answers a run is that of `make demo-grpo`.
STALENESS = (0, 1, 4) if IS_FULL else (1,)
GOAL = 0.9
# Of a step of the example.
ANSWERS = 240
# Steps over which the share of right answers is taken.
WINDOW = 5

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
Steps = list[dict[str, Any]]
# All runs of a placement have one engine.
PLACEMENTS = [
    pytest.param(placement, marks=pytest.mark.xdist_group(placement), id=placement) for placement in RolloutPlacement
]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], Path]:
    """The model that a run of a seed starts from; taught when first asked for."""

    @cache
    def write_model(seed: int) -> Path:
        folder = tmp_path_factory.mktemp("start")
        taught(seed, folder)
        return folder

    return write_model


def describe_job(folder: Path, placement: RolloutPlacement, staleness: int, seed: int, sign: float) -> dict[str, Any]:
    """Return the sections of the example's job with an engine in this place."""
    sections = make_job_spec(folder, seed, sign, staleness).model_dump(mode="json", by_alias=True, exclude_none=True)
    changes = {
        "training": {"globalBatchSize": ANSWERS},
        "grpo": {"rollout": {"placement": placement.value}},
        "checkpoint": {"everySteps": 1000, "exportHuggingFace": False},
        # For an engine beside the rank.
        "resources": {"memory": "12Gi"},
    }
    return merge_sections(sections, changes)


@pytest.fixture(scope="module")
def placement(request: pytest.FixtureRequest) -> RolloutPlacement:
    """The place of the engine."""
    return RolloutPlacement(request.param)


@pytest.fixture(scope="module")
def engine(
    placement: RolloutPlacement, start: Callable[[int], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Engine]:
    """An engine that gets its weights from every run."""
    folder = tmp_path_factory.mktemp("engine")
    (folder / "engine-model").mkdir()
    shutil.copy(start(1) / "config.json", folder / "engine-model")
    made = Engine(folder, folder / "engine.log", **describe_job(start(1), placement, 1, 1, 1.0))
    yield made.await_ready()
    made.kill()


def learn(engine: Engine, folder: Path, sections: dict[str, Any]) -> Steps:
    """Train beside the engine to the end; return the steps."""
    runs = Runs(folder)
    environ: dict[str, str] = {
        Environment.ROLLOUT_URLS: engine.url,
        Environment.SECRET: SECRET,
        Environment.HOST: "127.0.0.1",
    }
    try:
        run = runs.run_to_end("learning", environ=environ, **sections)
    finally:
        runs.close()
    return [json.loads(line) for line in (run.folder / "steps.jsonl").read_text().splitlines()]


def right_shares(steps: Steps) -> list[float]:
    """The share of right answers, a mean over each step and those before it."""
    shares = [step["reward/exact-match"] for step in steps]
    return [fmean(shares[place : place + WINDOW]) for place in range(len(shares) - WINDOW + 1)]


def steps_to_goal(steps: Steps) -> int:
    """The first step with which nine of ten sums were right."""
    return next(number for number, share in enumerate(right_shares(steps), WINDOW) if share > GOAL)


def assert_of_older_weights(steps: Steps, staleness: int) -> None:
    """Each step learns from answers of all ages that are allowed, and of no others."""
    ages = [step["staleness"] for step in steps]
    assert max(ages) == staleness
    assert [step["version"] for step in steps] == [*range(len(steps))]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("staleness", STALENESS)
@pytest.mark.parametrize("placement", PLACEMENTS, indirect=True)
def test_nine_of_ten_sums_are_right_in_the_end(
    engine: Engine,
    start: Callable[[int], Path],
    placement: RolloutPlacement,
    staleness: int,
    seed: int,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    steps = learn(engine, tmp_path, describe_job(start(seed), placement, staleness, seed, 1.0))
    shares = right_shares(steps)
    assert_of_older_weights(steps, staleness)
    assert 0.3 < steps[0]["reward/exact-match"] < 0.8
    assert shares[-1] > GOAL
    row = f"{placement}, staleness {staleness}"
    measured = (steps_to_goal(steps), round(shares[-1], 2))
    record_property(MATRIX, Entry("steps to nine of ten, share in the end", row, f"seed {seed}", measured).as_json)


@pytest.mark.parametrize("staleness", [1, 4] if IS_FULL else [4])
@pytest.mark.parametrize("placement", PLACEMENTS, indirect=True)
def test_with_its_sign_turned_a_reward_is_avoided(
    engine: Engine, start: Callable[[int], Path], placement: RolloutPlacement, staleness: int, tmp_path: Path
) -> None:
    steps = learn(engine, tmp_path, describe_job(start(1), placement, staleness, 1, -1.0))
    assert_of_older_weights(steps, staleness)
    assert right_shares(steps)[-1] < 0.5 * steps[0]["reward/exact-match"]
