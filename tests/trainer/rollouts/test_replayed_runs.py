"""Runs of GRPO that train on the experts of a real engine, in bfloat16, where its router and the trainer's differ."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from builders import merge_sections
from engines import SECRET, Engine
from moejob_api.contract.pods import Environment
from moejob_api.models import catalog
from moejob_trainer.data import tiny
from trainer.runs import Runs

pytestmark = pytest.mark.slow

STEPS = 2
ROLLOUT: dict[str, Any] = {"placement": "Separate", "sync": "Disk"}
GRPO: dict[str, Any] = {
    "method": "GRPO",
    "model": {"dtype": "bfloat16"},
    "data": {"train": [{"source": "moejob/tiny-sums", "format": "Prompts"}]},
    "training": {"maxSteps": STEPS, "globalBatchSize": 32},
    "grpo": {
        "groupSize": 4,
        "promptsPerStep": 8,
        "maxNewTokens": 24,
        "rewards": [{"name": "length"}],
        "rollout": ROLLOUT,
    },
}
LAYOUTS: dict[str, dict[str, Any]] = {"one rank": {}, "CP2": {"context": 2}, "TP2.EP2": {"tensor": 2, "expert": 2}}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("engine")
    (folder / "engine-model").mkdir()
    (folder / "engine-model/config.json").write_text(json.dumps(dict(catalog.find_config(tiny.TOKENIZER) or {})))
    job: dict[str, Any] = {
        "model": {"dtype": "bfloat16"},
        "data": {"maxLength": 64},
        "grpo": {"maxNewTokens": 64, "rollout": ROLLOUT, "routingReplay": True},
    }
    made = Engine(folder, folder / "engine.log", **job)
    yield made.await_ready()
    made.kill()


def _learned(engine: Engine, volume: Path, name: str, **sections: Any) -> list[dict[str, Any]]:
    """Return the lines of the step log of a run."""
    runs = Runs(volume)
    environ: dict[str, str] = {
        Environment.ROLLOUT_URLS: engine.url,
        Environment.SECRET: SECRET,
        Environment.HOST: "127.0.0.1",
    }
    try:
        run = runs.start(name, environ=environ, **merge_sections(GRPO, sections))
        codes = run.await_exit_codes()
        assert not any(codes), f"{codes}:\n{run.read_log()}"
    finally:
        runs.close()
    return [json.loads(line) for line in (run.folder / "steps.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def without(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return _learned(engine, tmp_path_factory.mktemp("volume"), "without")


@pytest.mark.thorough
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_run_on_the_experts_of_its_engine_is_nearer_to_what_the_engine_says(
    engine: Engine, without: list[dict[str, Any]], tmp_path: Path, layout: str
) -> None:
    replayed = _learned(
        engine, tmp_path / "volume", "replayed", grpo={"routingReplay": True}, parallelism=LAYOUTS[layout]
    )
    assert len(replayed) == len(without) == STEPS
    for line in replayed:
        # Rounded hidden states are routed to other experts now and then.
        assert 0.0 < line["routingDisagreement"] < 0.1
    assert all("routingDisagreement" not in line for line in without)
    means = [np.mean([line["mismatchMean"] for line in lines]) for lines in (replayed, without)]
    assert means[0] < means[1]
    # What is left is rounding; a token that went to another expert was far off.
    largest = [max(line["mismatchMaximum"] for line in lines) for lines in (replayed, without)]
    assert largest[0] < largest[1] / 2
