"""A model in Hugging Face's files, written by all ranks together and read back before it gets its name.

Each rank writes the tensors it owns; the first one adds config, tokenizer and index. Knows neither modules nor
Megatron.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path

import torch
from torch import Tensor

from moejob_trainer.conversion.checkpoint import INDEX_FILE, SINGLE_FILE, listed
from moejob_trainer.conversion.families import Table
from moejob_trainer.conversion.gathering import Gathering, agreed, names
from moejob_trainer.conversion.groups import ModelGroups, collected, shared, told
from moejob_trainer.conversion.imports import opened
from moejob_trainer.conversion.pieces import Piece
from moejob_trainer.conversion.shards import CorruptExport, Entry, planned, shard, verify
from moejob_trainer.conversion.templates import copy_beside
from moejob_trainer.model.parameters import local_slices

MOST_SHARD_BYTES = 5 * 10**9

# What all ranks together make of the finished folder before it gets its name; raises where it is not what it should be.
Check = Callable[[Path], None]


def unchecked(_: Path) -> None:
    """For weights without a model around them."""


@dataclass(frozen=True, slots=True)
class Target:
    """Where an export goes. `template` is the folder the model came from: its config, tokenizer and code go along.

    dtype: the type weights are written in; None writes them as they are held. Buffers stay float32.
    """

    folder: Path
    template: Path
    dtype: torch.dtype | None = None
    most_shard_bytes: int = MOST_SHARD_BYTES

    @property
    def unfinished(self) -> Path:
        """Where it is written until it is complete."""
        return self.folder.with_name(f".{self.folder.name}.unfinished")

    @property
    def replaced(self) -> Path:
        """Where an older export goes until the new one has its name."""
        return self.folder.with_name(f".{self.folder.name}.replaced")


@dataclass(frozen=True, slots=True)
class ExportReport:
    """A finished export, read back and found equal: the SHA-256 of every tensor by its name in the files."""

    folder: Path
    files: tuple[str, ...]
    bytes: int
    checksums: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class _Plan:
    """What a rank is about to write."""

    files: int
    bytes: int


@dataclass(frozen=True, slots=True)
class _Written:
    file: str
    entries: tuple[Entry, ...]
    checksums: Mapping[str, str]


def export(
    state: Mapping[str, Tensor], table: Table, groups: ModelGroups, target: Target, check: Check = unchecked
) -> ExportReport:
    """Writes the model whose parts all ranks hold in `state`, by our global names. All ranks call it together.

    An older export of that name is replaced, and is there until the new one is complete and checked.
    """
    gathering = agreed(state, table, groups)
    shards = _shards(gathering, target)
    mine = _Plan(len(shards), sum(entry.bytes for entries in shards for entry in entries))
    plans = shared(mine, groups.world)
    if groups.rank == 0:
        _prepare(gathering, target, sum(plan.bytes for plan in plans))
    files = _file_names([plan.files for plan in plans], groups.rank)
    # Nobody writes before the folder is there.
    told("ready", groups.world)
    written = _write(gathering, target, dict(zip(files, shards, strict=True)))
    for one in written:
        verify(target.unfinished / one.file, one.entries, one.checksums)
    everything = collected(written, groups.world)
    report = None if everything is None else _complete(table, target, list(chain.from_iterable(everything)))
    told("complete", groups.world)
    _import_again(gathering, target)
    check(target.unfinished)
    if collected("equal", groups.world) is not None:
        _replace(target)
    return told(report, groups.world)


def _shards(gathering: Gathering, target: Target) -> list[list[Entry]]:
    table = gathering.table
    entries = [
        Entry(name, piece.shape, _dtype(piece, gathering, target))
        for piece in gathering.owned()
        for name in names(piece, table)
    ]
    return planned(entries, target.most_shard_bytes)


def _dtype(piece: Piece, gathering: Gathering, target: Target) -> torch.dtype:
    parameter = gathering.table.by_name[piece.parameter]
    if target.dtype is None or parameter.is_buffer:
        return gathering.state[parameter.name].dtype
    return target.dtype


def _file_names(counts: Sequence[int], rank: int) -> list[str]:
    """The names of a rank's files, given how many each rank has."""
    total, first = sum(counts), sum(counts[:rank])
    if total == 1:
        return [SINGLE_FILE] * counts[rank]
    return [f"model-{first + index:05}-of-{total:05}.safetensors" for index in range(1, counts[rank] + 1)]


def _prepare(gathering: Gathering, target: Target, needed_bytes: int) -> None:
    """Whatever can be wrong before hours of writing is found here."""
    shutil.rmtree(target.unfinished, ignore_errors=True)
    target.unfinished.mkdir(parents=True)
    free_bytes = shutil.disk_usage(target.unfinished).free
    if free_bytes < needed_bytes:
        message = f"the export needs {needed_bytes:,} bytes and {free_bytes:,} are free; make room and resume the job"
        raise OSError(errno.ENOSPC, message, str(target.folder))
    # Asking for weights may put them together, which takes all ranks: not without need.
    dtype = target.dtype or max(gathering.state.values(), key=Tensor.numel).dtype
    copy_beside(target.template, target.unfinished, gathering.table.shape, dtype)


def _write(gathering: Gathering, target: Target, shards: Mapping[str, list[Entry]]) -> list[_Written]:
    tensors = _tensors(gathering, target)
    written = []
    for file, entries in shards.items():
        with shard(target.unfinished / file, entries) as opened_shard:
            checksums = {name: opened_shard.write(name, tensor) for name, tensor in islice(tensors, len(entries))}
        written.append(_Written(file, tuple(entries), checksums))
    # The others may still need this rank's parts.
    deque(tensors, maxlen=0)
    return written


def _tensors(gathering: Gathering, target: Target) -> Iterator[tuple[str, Tensor]]:
    for piece, tensor in gathering.tensors():
        cast = tensor.to(_dtype(piece, gathering, target))
        for name in names(piece, gathering.table):
            yield name, cast


def _complete(table: Table, target: Target, written: Sequence[_Written]) -> ExportReport:
    folder = target.unfinished
    _all_once(table, written)
    entries = {entry.name: (one.file, entry) for one in written for entry in one.entries}
    if len(written) > 1:
        (folder / INDEX_FILE).write_text(_index(entries), encoding="utf-8")
    # The same judgement as on every import: number, names, shapes and types of all tensors.
    opened(folder, table)
    return ExportReport(
        folder=target.folder,
        files=tuple(sorted(one.file for one in written)),
        bytes=sum(entry.bytes for _, entry in entries.values()),
        checksums={name: checksum for one in written for name, checksum in one.checksums.items()},
    )


def _import_again(gathering: Gathering, target: Target) -> None:
    """Whoever put tensors together reads its own part of them as an import would: it is what it holds, to the bit."""
    source, place = opened(target.unfinished, gathering.table), gathering.groups.coordinates
    mine = {piece.parameter for piece, _ in gathering.pieces()}
    for parameter in gathering.held():
        # Asking for a weight may put it together, which takes all ranks.
        weight = gathering.state[parameter.name].detach()
        if parameter.name in mine and not source.holds(weight, parameter, local_slices(parameter, place)):
            raise CorruptExport(
                f"{target.unfinished}: importing {parameter.name} would give other values than rank "
                f"{gathering.groups.rank} holds: its parts were put together wrongly; an older export stays as it was"
            )


def _all_once(table: Table, written: Sequence[_Written]) -> None:
    expected = Counter(name for piece in table.pieces for name in names(piece, table))
    found = Counter(entry.name for one in written for entry in one.entries)
    if found != expected:
        wrong = listed(found - expected) or listed(expected - found)
        raise RuntimeError(f"{len(found)} tensors were written, {len(expected)} expected; not once: {wrong}")


def _index(entries: Mapping[str, tuple[str, Entry]]) -> str:
    total = sum(entry.bytes for _, entry in entries.values())
    places = {name: file for name, (file, _) in sorted(entries.items())}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n"


def _replace(target: Target) -> None:
    """Gives the new export its name. A crash in between leaves a complete export under one of the two."""
    shutil.rmtree(target.replaced, ignore_errors=True)
    if target.folder.exists():
        target.folder.rename(target.replaced)
    target.unfinished.rename(target.folder)
    _sync(target.folder.parent)
    shutil.rmtree(target.replaced, ignore_errors=True)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
