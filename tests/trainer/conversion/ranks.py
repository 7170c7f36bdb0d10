"""Eight ranks that stay for all cells of a test: each imports its part of a checkpoint and exports it with the others.

Never imports Transformers: that would cost every rank seconds.
"""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moejob_api.job.parallelism import Parallelism
from moejob_api.layout.ranks import Group, members, place
from moejob_api.layout.sizes import Layout, layout
from moejob_api.models.families import shape_of
from moejob_trainer.conversion.export import ExportReport, Target, export
from moejob_trainer.conversion.families import Table, table
from moejob_trainer.conversion.gathering import hugging_face_tensors
from moejob_trainer.conversion.groups import ModelGroups
from moejob_trainer.conversion.imports import import_weights, opened
from moejob_trainer.model.parameters import Coordinates, local_shape

WORLD = 8
_PATIENCE_SECONDS = 60


@dataclass(frozen=True)
class Cell:
    """One model in one layout, read from one folder and written to another."""

    values: Mapping[str, Any]
    parallelism: Parallelism
    source: Path
    folder: Path
    most_shard_bytes: int = 10**9


@dataclass(frozen=True)
class Outcome:
    """What one rank saw."""

    report: ExportReport
    streamed: tuple[str, ...]


class Ranks:
    """The running ranks."""

    def __init__(self, connections: list[Connection]) -> None:
        self._connections = connections

    def run(self, cell: Cell) -> list[Outcome]:
        """What each rank of the cell's layout saw; AssertionError with the traceback of a rank that failed."""
        for connection in self._connections:
            connection.send(cell)
        answers = [self._answer(connection) for connection in self._connections]
        return [answer for answer in answers if answer is not None]

    def _answer(self, connection: Connection) -> Outcome | None:
        assert connection.poll(_PATIENCE_SECONDS), "a rank does not answer"
        answer = connection.recv()
        assert not isinstance(answer, str), answer
        found: Outcome | None = answer
        return found


@contextmanager
def running(rendezvous: Path) -> Iterator[Ranks]:
    """Eight ranks in processes of their own, gone when the block ends."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch", "torch.distributed", "safetensors.torch", "moejob_api.job.parallelism"])
    pairs = [context.Pipe() for _ in range(WORLD)]
    ranks = [
        context.Process(target=_live, args=(rank, rendezvous, theirs), daemon=True)
        for rank, (_, theirs) in enumerate(pairs)
    ]
    for rank in ranks:
        rank.start()
    try:
        yield Ranks([ours for ours, _ in pairs])
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()


def _live(rank: int, rendezvous: Path, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=WORLD)
    while True:
        try:
            connection.send(_outcome(connection.recv(), rank))
        except Exception:  # noqa: BLE001 (the test shows it)
            connection.send(traceback.format_exc())


def _outcome(cell: Cell, rank: int) -> Outcome | None:
    sizes = layout(cell.parallelism, gpus_per_node=8)
    groups = _groups(sizes, rank)
    if groups is None:
        return None
    found = table(shape_of(cell.values))
    state = _stage(found, sizes, rank, groups.coordinates)
    import_weights(state, opened(cell.source, found), groups.coordinates)
    target = Target(cell.folder, cell.source, most_shard_bytes=cell.most_shard_bytes)
    report = export(state, found, groups, target)
    return Outcome(report, tuple(name for name, _ in hugging_face_tensors(state, found, groups)))


def _groups(sizes: Layout, rank: int) -> ModelGroups | None:
    """The groups of a layout on as many of the ranks as it needs; every rank takes part in making each."""
    world = dist.new_group(list(range(sizes.gpus)))
    mine = {}
    for group in (Group.TENSOR, Group.EXPERT, Group.EXPERT_TENSOR):
        for ranks in sorted({members(sizes, group, other) for other in range(sizes.gpus)}):
            made = dist.new_group(list(ranks))
            if rank in ranks:
                mine[group] = made
    if rank >= sizes.gpus:
        return None
    return ModelGroups(world, mine[Group.TENSOR], mine[Group.EXPERT], mine[Group.EXPERT_TENSOR])


def _stage(found: Table, sizes: Layout, rank: int, coordinates: Coordinates) -> dict[str, Tensor]:
    stage = place(sizes, rank).pipeline
    return {
        parameter.name: torch.full(local_shape(parameter, coordinates), torch.nan)
        for parameter in found.parameters
        if stage in _stages(parameter.name, found, sizes.pipeline)
    }


def _stages(name: str, found: Table, count: int) -> set[int]:
    """Where a parameter is. A tied embedding is on both ends; the first stage has the layers that are left over."""
    last = count - 1
    match name.split("."):
        case ["layers", index, *_]:
            return {int(index) * count // len(found.shape.layers)}
        case ["embedding", *_]:
            return {0, last} if found.shape.tied_embeddings else {0}
        case _:
            return {last}
