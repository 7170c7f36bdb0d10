"""Weights and gradients that leave while answers are generated come back as they were, in every way to divide them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from builders import merge_sections
from moejob_api.models.shape import Family
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.generation_offload import make_generation_offload
from moejob_trainer.megatron.shares import local_part
from moejob_trainer.megatron.topology import stop_groups
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine
from trainer.parity.cells import STEPS, Cell, make_loss, micro_batches, start_engine
from trainer.worlds import Worlds

CELLS: dict[str, dict[str, Any]] = {
    "ZeRO-1": {"parallelism": {"expert": 2, "data": 2}},
    "ZeRO-2": {"parallelism": {"data": 2}, "memory": {"sharding": "ZeRO2"}},
    "FSDP": {"parallelism": {"data": 2}, "memory": {"sharding": "FSDP"}},
    "bfloat16": {"parallelism": {"tensor": 2}, "model": {"dtype": "bfloat16"}},
    "frozen router": {"parallelism": {"data": 2}, "moe": {"freezeRouter": True}},
}


@pytest.mark.parametrize("name", CELLS)
def test_a_run_that_offloads_between_updates_trains_the_same_to_the_bit(
    worlds: Worlds, reference: Any, name: str
) -> None:
    folder, _ = reference(Family.QWEN3_MOE)
    cell = Cell(Family.QWEN3_MOE, merge_sections({}, CELLS[name]))
    calm = worlds.run(cell.ranks(), losses, cell, folder, False)[0]
    for offloaded in worlds.run(cell.ranks(), losses, cell, folder, True):
        assert offloaded == calm


def losses(cell: Cell, folder: Path, offloads: bool) -> list[tuple[float, float]]:
    """Losses and gradient norms of one rank, whose tensors leave before each update or stay."""
    use_cpu()
    engine = start_engine(cell, folder)
    try:
        offload = make_generation_offload(engine.stages, engine.data_parallel, parameters=True, gradients=True)
        found = []
        for step in range(STEPS):
            if offloads:
                offload.move_to_host()
                assert _held(engine) == 0
                offload.move_to_device()
            result = engine.update(micro_batches(cell, engine, step), make_loss(cell, engine))
            found.append((result.loss, result.gradient_norm))
    finally:
        stop_groups()
    return found


def _held(engine: MegatronTrainingEngine) -> int:
    """Bytes of weights and gradients."""
    parameters = [parameter for stage in engine.stages for parameter in stage.parameters()]
    gradients = [engine.data_parallel.local_gradient(parameter) for parameter in parameters if parameter.requires_grad]
    storages = [local_part(parameter).untyped_storage() for parameter in parameters]
    return sum(storage.nbytes() for storage in (*storages, *[one.untyped_storage() for one in gradients]))


def test_what_a_job_does_not_name_stays(worlds: Worlds, reference: Any) -> None:
    folder, _ = reference(Family.QWEN3_MOE)
    weights, gradients = worlds.run(1, parts_held, Cell(Family.QWEN3_MOE, {}), folder)[0]
    assert weights == gradients
    assert weights > 0


def parts_held(cell: Cell, folder: Path) -> tuple[int, int]:
    """Bytes that stay when gradients leave alone, and when weights do."""
    use_cpu()
    engine = start_engine(cell, folder)
    try:
        found = []
        for parameters in (False, True):
            offload = make_generation_offload(
                engine.stages, engine.data_parallel, parameters=parameters, gradients=not parameters
            )
            offload.move_to_host()
            found.append(_held(engine))
            offload.move_to_device()
    finally:
        stop_groups()
    return found[0], found[1]
