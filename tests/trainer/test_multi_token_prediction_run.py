"""A run of a model with modules that predict further tokens (MTP), from published files to published files."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moejob_api.contract.pods import ExitCode, RunFile
from moejob_api.models.shape import Family
from moejob_trainer.data import tiny
from trainer.parity.multi_token_prediction import LAYERS, MODULES, FurtherReference
from trainer.runs import Runs

MODULE_LAYERS = [f"model.layers.{LAYERS + number}." for number in range(MODULES)]


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Runs]:
    made = Runs(tmp_path / "volume")
    made.volume.mkdir()
    yield made
    made.close()


@pytest.fixture
def model(tmp_path: Path) -> Path:
    FurtherReference(Family.DEEPSEEK_V3, vocab_size=512).save(tmp_path / "model")
    tiny.build_tokenizer().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def _settings(model: Path, **training: Any) -> dict[str, Any]:
    return {
        "model": {"source": str(model)},
        "training": {"maxSteps": 6, **training},
        "parallelism": {"pipeline": 2},
        "checkpoint": {"exportHuggingFace": True},
    }


def _lines(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / RunFile.STEPS).read_text().splitlines()]


def _written(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in (folder / RunFile.EXPORT).glob("*.safetensors"):
        found |= load_file(path)
    return found


def _modules(tensors: dict[str, torch.Tensor]) -> set[str]:
    return {name for name in tensors if name.startswith(tuple(MODULE_LAYERS))}


def test_further_tokens_are_learned_told_of_and_published(runs: Runs, model: Path) -> None:
    folder = runs.run_to_end(**_settings(model, mtpLossCoefficient=0.5)).folder
    losses = [line["mtpLoss"] for line in _lines(folder)]
    assert len(losses) == 6
    assert losses[-1] < losses[0]
    before, after = load_file(model / "model.safetensors"), _written(folder)
    modules = _modules(before)
    assert _modules(after) >= modules
    moved = {name for name in modules if not name.endswith("bias") and not torch.equal(before[name], after[name])}
    assert moved == {name for name in modules if not name.endswith("bias")}
    # What was published is a model to start from.
    again = runs.run_to_end("again", **_settings(folder / RunFile.EXPORT, maxSteps=1, mtpLossCoefficient=0.5)).folder
    assert _lines(again)[0]["mtpLoss"] < losses[0]


def test_a_run_that_learns_nothing_of_them_publishes_a_model_without(runs: Runs, model: Path) -> None:
    folder = runs.run_to_end(**_settings(model, maxSteps=1, mtpLossCoefficient=0)).folder
    assert "mtpLoss" not in _lines(folder)[0]
    assert _modules(_written(folder)) == set()
    assert json.loads((folder / RunFile.EXPORT / "config.json").read_text())["num_nextn_predict_layers"] == 0
    config = folder / RunFile.EXPORT / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"num_nextn_predict_layers": MODULES}))
    refused = runs.start("refused", **_settings(folder / RunFile.EXPORT, maxSteps=1))
    assert ExitCode.BAD_CONFIGURATION in refused.await_exit_codes()
    assert "set training.mtpLossCoefficient to 0" in refused.read_log()
