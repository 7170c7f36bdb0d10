"""Sums and gathers that run beside the computation train what Transformers trains, and no layer computes too early."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
from megatron.core.distributed import DistributedDataParallelConfig
from torch import nn

from builders import merge_sections
from moejob_api.models.shape import Family
from moejob_trainer.megatron import data_parallel
from moejob_trainer.megatron.cpu import use_cpu
from moejob_trainer.megatron.topology import stop_groups
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine
from trainer.parity.cells import Cell, assert_like, make_loss, micro_batches, start_engine, train_cell
from trainer.parity.references import Reference
from trainer.rows import make_rows
from trainer.worlds import Worlds

WITHIN = 1e-5
OVERLAPPED = {"training": {"communication": {"overlapGradientReduction": True, "overlapParameterGather": True}}}
# Several buckets: with Megatron's own size all of a small model is one.
BUCKET_ELEMENTS = 3000

CELLS: dict[str, tuple[Family, dict[str, Any]]] = {
    "DP2": (Family.QWEN3_MOE, {"parallelism": {"data": 2}}),
    "DP2, tied embeddings": (Family.QWEN3, {"parallelism": {"data": 2}}),
    "EP2.DP2": (Family.DEEPSEEK_V3, {"parallelism": {"expert": 2, "data": 2}}),
    "PP2.DP2, tied embeddings": (Family.QWEN2, {"parallelism": {"pipeline": 2, "data": 2}}),
    "PP2.VPP2.DP2": (
        Family.QWEN3_MOE,
        {"parallelism": {"pipeline": 2, "virtualPipeline": 2, "data": 2}, "training": {"microBatchSize": 2}},
    ),
    "DP2, everything recomputed": (
        Family.MIXTRAL,
        {"parallelism": {"data": 2}, "training": {"recompute": {"granularity": "Full"}}},
    ),
}


def _cell(name: str) -> Cell:
    family, sections = CELLS[name]
    return Cell(family, merge_sections(OVERLAPPED, sections))


@pytest.mark.parametrize("name", make_rows(CELLS, always=["DP2", "EP2.DP2", "PP2.DP2, tied embeddings"]))
def test_exchanges_beside_the_computation_train_what_transformers_trains(
    worlds: Worlds, reference: Reference, name: str
) -> None:
    cell = _cell(name)
    folder, expected = reference(cell.family)
    assert_like(worlds.run(cell.ranks(), trained_in_buckets, cell, folder), expected, within=WITHIN)


def trained_in_buckets(cell: Cell, folder: Path) -> Any:
    with _small_buckets():
        return train_cell(cell, folder)


@pytest.mark.parametrize(
    "name", make_rows(["DP2", "DP2, tied embeddings", "EP2.DP2", "PP2.DP2, tied embeddings"], always=["DP2", "EP2.DP2"])
)
def test_a_layer_waits_for_its_own_weights_and_for_no_others(worlds: Worlds, reference: Reference, name: str) -> None:
    cell = _cell(name)
    folder, _ = reference(cell.family)
    for behind_an_update, entered, read in worlds.run(cell.ranks(), pending, cell, folder):
        assert behind_an_update > 2, "the gather is over before the next pass begins"
        assert [own for own, _ in entered] == [0] * len(entered), "a layer computes before its weights are here"
        assert max(others for _, others in entered) > 0, "the first layer waits for the weights of all"
        assert read == 0


def pending(cell: Cell, folder: Path) -> tuple[int, list[tuple[int, int]], int]:
    """Buckets on their way behind an update; at the door of each unit, its own and others; when weights are read."""
    use_cpu()
    with _small_buckets():
        engine = start_engine(cell, folder)
    try:
        chunk: Any = engine.data_parallel.model_chunks[0]
        entered: list[tuple[int, int]] = []

        def seen(unit: nn.Module, _: object) -> None:
            own = {chunk.param_to_bucket_group[each] for each in unit.parameters()}
            on_its_way = set(_on_their_way(engine))
            entered.append((len(on_its_way & own), len(on_its_way - own)))

        engine.update(micro_batches(cell, engine, 0), make_loss(cell, engine))
        behind_an_update = len(_on_their_way(engine))
        stage = chunk.module
        for unit in (*stage.layers.values(), *(getattr(stage, name, None) for name in ("embedding", "output"))):
            if unit is not None:
                unit.register_forward_pre_hook(seen)
        engine.update(micro_batches(cell, engine, 1), make_loss(cell, engine))
        assert engine.stages
        read = len(_on_their_way(engine))
    finally:
        stop_groups()
    return behind_an_update, entered, read


def _on_their_way(engine: MegatronTrainingEngine) -> list[Any]:
    chunks: Sequence[Any] = engine.data_parallel.model_chunks
    groups = (group for chunk in chunks for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups))
    return [group for group in groups if group.param_gather_handle is not None]


def _small_buckets() -> Any:
    config = partial(DistributedDataParallelConfig, bucket_size=BUCKET_ELEMENTS)
    return patch.object(data_parallel, "DistributedDataParallelConfig", config)
