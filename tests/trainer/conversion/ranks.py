"""A rank in the cells of a test: it imports its part of a checkpoint and exports it with the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moejob_api.job.parallelism import Parallelism
from moejob_api.layout.ranks import ParallelGroup, group_members, rank_place
from moejob_api.layout.sizes import Layout, derive_layout
from moejob_api.models.families import shape_of
from moejob_trainer.conversion.families import TensorTable, build_tensor_table
from moejob_trainer.conversion.gathering import hugging_face_tensors
from moejob_trainer.conversion.groups import ModelGroups
from moejob_trainer.conversion.loading import import_weights, open_published_checkpoint
from moejob_trainer.conversion.model_export import ExportReport, ExportTarget, export_weights
from moejob_trainer.conversion.text_part import read_other_parts
from moejob_trainer.model.parameters import Coordinates, local_shape


@dataclass(frozen=True)
class Cell:
    """One model in one layout, read from one folder and written to another."""

    values: Mapping[str, Any]
    parallelism: Parallelism
    source: Path
    folder: Path
    most_shard_bytes: int = 10**9

    def ranks(self) -> int:
        """Ranks that it takes."""
        return derive_layout(self.parallelism, gpus_per_node=8).gpus


@dataclass(frozen=True)
class Outcome:
    """Results of one rank."""

    report: ExportReport
    streamed: tuple[str, ...]


def outcome(cell: Cell) -> Outcome:
    """Imports and exports a rank's part of the cell."""
    sizes, rank = derive_layout(cell.parallelism, gpus_per_node=8), dist.get_rank()
    groups = _groups(sizes, rank)
    found = build_tensor_table(shape_of(cell.values))
    state = _stage(found, sizes, rank, groups.coordinates)
    import_weights(state, open_published_checkpoint(cell.source, found), groups.coordinates)
    parts = read_other_parts(cell.source, lambda: cell.source)
    target = ExportTarget(cell.folder, cell.source, most_shard_bytes=cell.most_shard_bytes, parts=parts)
    report = export_weights(state, found, groups, target)
    return Outcome(report, tuple(name for name, one in hugging_face_tensors(state, found, groups) if not one.is_meta))


def _groups(sizes: Layout, rank: int) -> ModelGroups:
    """The groups of a layout; every rank takes part in making each."""
    mine = {}
    for group in (ParallelGroup.TENSOR, ParallelGroup.EXPERT, ParallelGroup.EXPERT_TENSOR):
        for ranks in sorted({group_members(sizes, group, other) for other in range(sizes.gpus)}):
            made = dist.new_group(list(ranks))
            if rank in ranks:
                mine[group] = made
    return ModelGroups(
        dist.group.WORLD, mine[ParallelGroup.TENSOR], mine[ParallelGroup.EXPERT], mine[ParallelGroup.EXPERT_TENSOR]
    )


def _stage(found: TensorTable, sizes: Layout, rank: int, coordinates: Coordinates) -> dict[str, Tensor]:
    stage = rank_place(sizes, rank).pipeline
    return {
        parameter.name: torch.full(local_shape(parameter, coordinates), torch.nan)
        for parameter in found.parameters
        if stage in _stages(parameter.name, found, sizes.pipeline)
    }


def _stages(name: str, found: TensorTable, count: int) -> set[int]:
    """Return the stages of a parameter. A tied embedding is on both ends; the first stage has the layers left over."""
    last = count - 1
    match name.split("."):
        case ["layers", index, *_]:
            return {int(index) * count // len(found.shape.layers)}
        case ["embedding", *_]:
            return {0, last} if found.shape.tied_embeddings else {0}
        case _:
            return {last}
