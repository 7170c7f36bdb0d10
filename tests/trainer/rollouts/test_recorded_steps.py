"""A step of a real run beside a real engine, computed again by a script that reads its record and knows no moejob."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from engines import ROOT
from moejob_api.models import catalog
from moejob_trainer.data import tiny
from trainer.rollouts.beside import Beside, lay_out

pytestmark = pytest.mark.slow

SCRIPT = ROOT / "examples/recompute_step.py"
# Groups of equal rewards, and a reward that fails, so that groups are left out for both reasons.
REWARDS = """
def judge_letters(completions, **_):
    return [float("nan") if text.count("o") > 2 else float(len(text) % 2) for text in completions]
"""
GRPO: dict[str, Any] = {
    "groupSize": 4,
    "promptsPerStep": 4,
    "maxNewTokens": 8,
    "temperature": 0.9,
    "recordTokens": True,
    "overlong": {"filter": True},
    "dynamicSampling": {"overSampling": 3.0},
    "kl": {"coefficient": 0.05},
}
# Ten times what was measured and more: 2.9e-6 of log-probabilities, 1e-6 of losses, 2.5e-6 of norms, 5.9e-6 of updates.
BOUNDS = {
    "log-probabilities, engine": 3e-5,
    "ratios to the engine": 3e-5,
    "log-probabilities, trainer": 3e-5,
    "log-probabilities, reference model": 3e-5,
    "advantages": 3e-5,
    "loss": 1e-5,
    "gradient norm, relative": 3e-5,
    "updates of the weights, relative": 1e-4,
}


@pytest.fixture(scope="module")
def beside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Beside]:
    folder = tmp_path_factory.mktemp("engine")
    lay_out(folder / "engine-model")
    made = Beside(folder)
    yield made
    made.close()


@pytest.fixture(scope="module")
def published_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the engine's shape, half of whose answers end."""
    folder = tmp_path_factory.mktemp("published")
    torch.manual_seed(1)
    sizes: dict[str, Any] = dict(catalog.find_config(tiny.TOKENIZER) or {})
    config = AutoConfig.for_model(**sizes)
    model: Any = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    tokenizer = tiny.build_tokenizer()
    with torch.no_grad():
        model.lm_head.weight.mul_(6)
        # Turned round: with its own sign no answer has an end.
        model.lm_head.weight[tokenizer.eos_token_id].mul_(-2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "letters.py").write_text(REWARDS)
    return folder


def recompute(
    beside: Beside, published_folder: Path, name: str, **sections: Any
) -> tuple[dict[str, float], dict[str, torch.Tensor]]:
    """Run one step, and compute it again; the distances, and the record."""
    rewards = [{"module": "letters:judge_letters", "modulePath": str(published_folder)}]
    run = beside.run_to_end(
        name,
        model={"source": str(published_folder)},
        parallelism=sections.get("parallelism", {}),
        training={"maxSteps": 1, "globalBatchSize": 8, "optimizer": {"learningRate": 1e-4}},
        grpo=GRPO | {"rewards": rewards} | sections.get("grpo", {}),
        checkpoint={"everySteps": 1000, "exportHuggingFace": True},
    )
    return compute_again(run.folder), load_file(run.folder / "tokens/step-1.safetensors")


def compute_again(run: Path) -> dict[str, float]:
    """Return the distances that the script prints."""
    command = [sys.executable, str(SCRIPT), str(run), "--after", str(run / "export"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    distances: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return distances


CASES: dict[str, dict[str, Any]] = {
    "EP2": {"parallelism": {"expert": 2}},
    "one rank, whole answers and epochs": {
        "grpo": {
            "importance": "Sequence",
            "lossAggregation": "Sequence",
            "advantage": "RLOO",
            "epochsPerStep": 2,
            "kl": {"coefficient": 0.05, "kind": "K2"},
            "clipLow": 3e-4,
            "clipHigh": 4e-4,
        }
    },
    "TP2, CISPO, one number for all answers": {
        "parallelism": {"tensor": 2},
        "grpo": {
            "policyLoss": "CISPO",
            "lossAggregation": "Constant",
            "advantage": "DrGRPO",
            "mismatch": {"level": "Sequence", "mode": "Mask"},
            "kl": {"coefficient": 0.0},
        },
    },
    "two replicas, a penalty in the reward": {
        "parallelism": {"data": 2},
        "grpo": {
            "advantage": "ReinforcePlusPlus",
            "lossAggregation": "Group",
            "kl": {"coefficient": 0.1, "applyTo": "Reward", "kind": "K1"},
            "entropyCoefficient": 0.01,
            "dualClip": 3.0,
        },
    },
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", CASES)
def test_a_step_is_computed_again_from_outside(beside: Beside, published_folder: Path, name: str) -> None:
    distances, record = recompute(beside, published_folder, f"recorded-{[*CASES].index(name)}", **CASES[name])
    # Groups of all kinds, answers without an end, and several updates: else nothing is said of these.
    assert {*record["group.outcome"].tolist()} == {0, 1, 2}
    assert {*record["answer.truncated"].tolist()} == {0, 1}
    assert len(record["update.loss"]) == 2 * CASES[name].get("grpo", {}).get("epochsPerStep", 1)
    assert {key: value for key, value in distances.items() if not value <= BOUNDS[key]} == {}, distances
    assert distances.keys() >= {"loss", "gradient norm, relative", "updates of the weights, relative"}


# Mistakes that a trainer could make, as changes of the record, and the distance that each must show in.
MISTAKES: dict[str, tuple[str, Callable[[torch.Tensor], torch.Tensor]]] = {
    "updates of the weights, relative": ("update.learningRate", lambda rates: rates * 1.02),
    "loss": ("update.answers", lambda answers: answers.roll(1)),
    "gradient norm, relative": ("update.gradientNorm", lambda norms: norms * 1.001),
    "advantages": ("answer.reward", lambda rewards: 1 - rewards),
    "log-probabilities, engine": ("token.engine", lambda values: values - 1e-3),
}


@pytest.mark.thorough
@pytest.mark.parametrize("distance", MISTAKES)
def test_a_record_that_says_something_else_is_far_from_what_is_computed(
    beside: Beside, published_folder: Path, distance: str
) -> None:
    run = beside.runs.volume / "mistaken"
    if not run.exists():
        recompute(beside, published_folder, "mistaken")
    file = run / "tokens/step-1.safetensors"
    with safe_open(file, "pt") as record:
        facts, arrays = record.metadata(), load_file(file)
    name, change = MISTAKES[distance]
    try:
        save_file(arrays | {name: change(arrays[name]).contiguous()}, file, facts)
        assert compute_again(run)[distance] > 2 * BOUNDS[distance]
    finally:
        save_file(arrays, file, facts)
