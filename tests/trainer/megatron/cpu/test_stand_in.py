"""Every part of the stand-in for CUDA is one that Megatron still fails without."""

from __future__ import annotations

import os
from importlib import import_module
from pathlib import Path

import pytest
import torch

from moejob_api.models.shape import Family
from moejob_trainer.megatron.cpu import stand_in, use_cpu
from moejob_trainer.megatron.topology import stop_groups
from trainer.parity.cells import Cell, make_loss, micro_batches, reference_model, start_engine
from trainer.worlds import Worlds

FUNCTIONS = ("cuda.current_device", "cuda.current_stream", "cuda.synchronize", "zeros")
# Stages of chunks ask one another for shapes where micro batches have different lengths, and wait for the device then.
PIPELINE = Cell(
    Family.QWEN3,
    {
        "parallelism": {"pipeline": 2, "virtualPipeline": 2},
        "training": {"microBatchSize": 1, "globalBatchSize": 4},
    },
    lengths=(9, 17, 5, 12),
)
# Only replicas sum gradients.
REPLICAS = Cell(
    Family.QWEN3, {"parallelism": {"data": 2}, "training": {"microBatchSize": 1, "globalBatchSize": 4}}, lengths=(9, 17)
)


def updated_without(part: str, cell: Cell, folder: Path) -> str:
    """Return the error of an update when this part of the stand-in is missing."""
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    use_cpu()
    _leave_out(part)
    try:
        engine = start_engine(cell, folder)
        engine.update(micro_batches(cell, engine, 0), make_loss(cell, engine))
    except (AssertionError, RuntimeError) as error:
        return str(error)
    finally:
        stop_groups()
    return ""


def _leave_out(part: str) -> None:
    if part in stand_in.MODULES:
        vars(import_module(part))["torch"] = torch
    for module in stand_in.MODULES if part in FUNCTIONS else ():
        owner, _, name = part.rpartition(".")
        seen, real = vars(import_module(module))["torch"], torch
        seen, real = (seen.cuda, torch.cuda) if owner else (seen, real)
        setattr(seen, name, getattr(real, name))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    reference_model(PIPELINE.family).save_pretrained(folder / "first")
    return folder


@pytest.mark.parametrize("part", [*stand_in.MODULES, *FUNCTIONS])
def test_megatron_fails_without_any_part_of_the_stand_in(model: Path, tmp_path: Path, part: str) -> None:
    # Ranks of its own: what one takes out is missing for good.
    worlds = Worlds(2, tmp_path)
    try:
        cell = REPLICAS if part == "cuda.current_stream" else PIPELINE
        said = worlds.run(2, updated_without, part, cell, model)
    finally:
        worlds.close()
    assert any("CUDA" in text or "NVIDIA" in text for text in said), said


@pytest.mark.parametrize("cell", [PIPELINE, REPLICAS], ids=["stages", "replicas"])
def test_with_all_of_it_megatron_computes(worlds: Worlds, model: Path, cell: Cell) -> None:
    assert worlds.run(2, updated_without, "", cell, model) == ["", ""]
