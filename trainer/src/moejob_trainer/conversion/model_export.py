"""A model in Hugging Face's files, written by all ranks together and read back before it gets its name.

Each rank writes the tensors it owns; the first one adds config, tokenizer and index. Knows neither modules nor
Megatron.
"""

from __future__ import annotations

import errno
import json
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import torch
from pydantic import TypeAdapter
from torch import Tensor

from moejob_api.models.shape import ModelShape
from moejob_trainer.conversion.checkpoint import INDEX_FILE, SINGLE_FILE, listed
from moejob_trainer.conversion.families import Table
from moejob_trainer.conversion.gathering import TensorGathering, names, plan_gathering
from moejob_trainer.conversion.groups import ModelGroups
from moejob_trainer.conversion.loading import opened
from moejob_trainer.conversion.safetensors_writer import CorruptExport, TensorEntry, planned, shard_writer, verify
from moejob_trainer.conversion.templates import copy_beside
from moejob_trainer.conversion.tensor_table import Piece
from moejob_trainer.distributed import messages
from moejob_trainer.model.parameters import local_slices
from moejob_trainer.runtime.disk import Disk, publish_folder

MOST_SHARD_BYTES = 5 * 10**9

# Check of all ranks on the finished folder before it gets its name; raises where the folder is wrong.
Check = Callable[[Path], None]


def unchecked(_: Path) -> None:
    """Accept weights that no model was built for."""


@dataclass(frozen=True, slots=True)
class Target:
    """Destination of an export. `template` is the folder the model came from: its config, tokenizer and code go along.

    dtype: the type weights are written in; None writes them as they are held. Buffers stay float32.
    """

    folder: Path
    template: Path
    dtype: torch.dtype | None = None
    most_shard_bytes: int = MOST_SHARD_BYTES

    @property
    def unfinished(self) -> Path:
        """The folder of an export until it is complete."""
        return self.folder.with_name(f".{self.folder.name}.unfinished")


@dataclass(frozen=True, slots=True)
class ExportReport:
    """A finished export, read back and found equal: the SHA-256 of every tensor by its name in the files."""

    folder: Path
    files: tuple[str, ...]
    bytes: int
    checksums: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Plan:
    """The files that a rank is about to write."""

    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """One file of an export, and the checksum of every tensor in it."""

    file: str
    entries: tuple[TensorEntry, ...]
    checksums: Mapping[str, str]


_PLAN = TypeAdapter(_Plan)
_WRITTEN = TypeAdapter(list[WrittenFile])
_REPORT = TypeAdapter(ExportReport)


def export(
    state: Mapping[str, Tensor], table: Table, groups: ModelGroups, target: Target, check: Check = unchecked
) -> ExportReport:
    """Write the model whose parts all ranks hold in `state`, by our global names. All ranks call it together.

    An older export of that name is replaced, and is there until the new one is complete and checked.
    """
    gathering = plan_gathering(state, table, groups)
    shards = _shards(gathering, target)
    mine = _Plan(len(shards), sum(entry.bytes for entries in shards for entry in entries))
    plans = messages.all_gather(mine, _PLAN, groups.world)
    if groups.rank == 0:
        _prepare(gathering, target, sum(plan.bytes for plan in plans))
    files = file_names([plan.files for plan in plans], groups.rank)
    # No rank writes before the folder is there.
    messages.barrier(groups.world)
    written = _write(gathering, target, dict(zip(files, shards, strict=True)))
    for one in written:
        verify(target.unfinished / one.file, one.entries, one.checksums)
    everything = messages.gather(written, _WRITTEN, groups.world)
    report = None if everything is None else complete(table, target, list(chain.from_iterable(everything)))
    messages.barrier(groups.world)
    _import_again(gathering, target)
    check(target.unfinished)
    # No rank replaces an export that another has found to differ.
    messages.barrier(groups.world)
    if groups.rank == 0:
        publish_folder(Disk(), target.unfinished, target.folder)
    return messages.broadcast(report, _REPORT, groups.world)


def _shards(gathering: TensorGathering, target: Target) -> list[list[TensorEntry]]:
    table = gathering.table
    entries = [
        TensorEntry(name, piece.shape, _dtype(piece, gathering, target))
        for piece in gathering.owned()
        for name in names(piece, table)
    ]
    return planned(entries, target.most_shard_bytes)


def _dtype(piece: Piece, gathering: TensorGathering, target: Target) -> torch.dtype:
    parameter = gathering.table.by_name[piece.parameter]
    if target.dtype is None or parameter.is_buffer:
        return gathering.state[parameter.name].dtype
    return target.dtype


def file_names(counts: Sequence[int], rank: int) -> list[str]:
    """Return the names of a rank's files, given how many each rank has."""
    total, first = sum(counts), sum(counts[:rank])
    if total == 1:
        return [SINGLE_FILE] * counts[rank]
    return [f"model-{first + index:05}-of-{total:05}.safetensors" for index in range(1, counts[rank] + 1)]


def _prepare(gathering: TensorGathering, target: Target, needed_bytes: int) -> None:
    # Reading weights may assemble them, which takes all ranks: read none without need.
    dtype = target.dtype or max(gathering.state.values(), key=Tensor.numel).dtype
    prepare(target, gathering.table.shape, dtype, needed_bytes)


def prepare(target: Target, shape: ModelShape, dtype: torch.dtype, needed_bytes: int) -> None:
    """Make the unfinished folder, and find every error that shows before hours of writing."""
    shutil.rmtree(target.unfinished, ignore_errors=True)
    target.unfinished.mkdir(parents=True)
    free_bytes = shutil.disk_usage(target.unfinished).free
    if free_bytes < needed_bytes:
        message = f"the export needs {needed_bytes:,} bytes and {free_bytes:,} are free; make room and try again"
        raise OSError(errno.ENOSPC, message, str(target.folder))
    copy_beside(target.template, target.unfinished, shape, dtype)


def _write(gathering: TensorGathering, target: Target, shards: Mapping[str, list[TensorEntry]]) -> list[WrittenFile]:
    tensors = _tensors(gathering, target)
    written = []
    for file, entries in shards.items():
        with shard_writer(target.unfinished / file, entries) as opened_shard:
            checksums = {name: opened_shard.write(name, tensor) for name, tensor in islice(tensors, len(entries))}
            opened_shard.sync()
        written.append(WrittenFile(file, tuple(entries), checksums))
    # The others may still need this rank's parts.
    deque(tensors, maxlen=0)
    return written


def _tensors(gathering: TensorGathering, target: Target) -> Iterator[tuple[str, Tensor]]:
    for piece, tensor in gathering.tensors():
        cast = tensor.to(_dtype(piece, gathering, target))
        for name in names(piece, gathering.table):
            yield name, cast


def complete(table: Table, target: Target, written: Sequence[WrittenFile]) -> ExportReport:
    """Add the index, and hold the files against the model's table."""
    folder = target.unfinished
    _all_once(table, written)
    entries = {entry.name: (one.file, entry) for one in written for entry in one.entries}
    if len(written) > 1:
        Disk().write(folder / INDEX_FILE, _index(entries).encode())
    # The check of every import: number, names, shapes and types of all tensors.
    opened(folder, table)
    return ExportReport(
        folder=target.folder,
        files=tuple(sorted(one.file for one in written)),
        bytes=sum(entry.bytes for _, entry in entries.values()),
        checksums={name: checksum for one in written for name, checksum in one.checksums.items()},
    )


def _import_again(gathering: TensorGathering, target: Target) -> None:
    """Read back this rank's own part of the tensors it put together, and compare it to the bit."""
    source, place = opened(target.unfinished, gathering.table), gathering.groups.coordinates
    mine = {piece.parameter for piece, _ in gathering.pieces()}
    for parameter in gathering.held():
        # Reading a weight may assemble it, which takes all ranks.
        weight = gathering.state[parameter.name].detach()
        if parameter.name in mine and not source.holds(weight, parameter, local_slices(parameter, place)):
            raise CorruptExport(
                f"{target.unfinished}: importing {parameter.name} would give other values than rank "
                f"{gathering.groups.rank} holds: its parts were put together wrongly; an older export stays as it was"
            )


def _all_once(table: Table, written: Sequence[WrittenFile]) -> None:
    expected = Counter(name for piece in table.pieces for name in names(piece, table))
    found = Counter(entry.name for one in written for entry in one.entries)
    if found != expected:
        wrong = listed(found - expected) or listed(expected - found)
        raise RuntimeError(f"{len(found)} tensors were written, {len(expected)} expected; not once: {wrong}")


def _index(entries: Mapping[str, tuple[str, TensorEntry]]) -> str:
    total = sum(entry.bytes for _, entry in entries.values())
    places = {name: file for name, (file, _) in sorted(entries.items())}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n"


@contextmanager
def removed_on_failure(unfinished: Path) -> Iterator[None]:
    """Remove the unfinished folder afterwards; a complete export has its final name by then."""
    try:
        yield
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
