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
from moejob_trainer.conversion.checkpoint import INDEX_FILE, SINGLE_FILE, join_names
from moejob_trainer.conversion.families import TensorTable
from moejob_trainer.conversion.gathering import TensorGathering, plan_gathering, published_names
from moejob_trainer.conversion.groups import ModelGroups
from moejob_trainer.conversion.loading import open_published_checkpoint
from moejob_trainer.conversion.safetensors_writer import (
    CorruptExport,
    TensorEntry,
    WrittenFile,
    open_shard_writer,
    plan_shards,
    verify,
)
from moejob_trainer.conversion.templates import copy_config_and_tokenizer
from moejob_trainer.conversion.tensor_table import TensorPiece
from moejob_trainer.conversion.text_part import TEXT_ALONE, PublishedParts
from moejob_trainer.distributed import messages
from moejob_trainer.model.parameters import local_slices
from moejob_trainer.runtime.disk import Disk, publish_folder
from moejob_trainer.runtime.heartbeats import ShareCounter, ShareReport, ignore_share

MOST_SHARD_BYTES = 5 * 10**9

# Check of all ranks on the finished folder before it gets its name; raises where the folder is wrong.
Check = Callable[[Path], None]


def skip_check(_: Path) -> None:
    """Accept weights that no model was built for."""


@dataclass(frozen=True, slots=True)
class ExportTarget:
    """Destination of an export. `template` is the folder the model came from: its config, tokenizer and code go along.

    dtype: the type weights are written in; None writes them as they are held. Buffers stay float32.
    parts: the parts of the model that are not trained, which are written as they were published.
    """

    folder: Path
    template: Path
    dtype: torch.dtype | None = None
    most_shard_bytes: int = MOST_SHARD_BYTES
    report_share: ShareReport = ignore_share
    parts: PublishedParts = TEXT_ALONE

    @property
    def unfinished_folder(self) -> Path:
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
class _RankPlan:
    """The files that a rank is about to write."""

    files: int
    bytes: int


_PLAN = TypeAdapter(_RankPlan)
_WRITTEN = TypeAdapter(list[WrittenFile])
_REPORT = TypeAdapter(ExportReport)


def export_weights(
    state: Mapping[str, Tensor],
    table: TensorTable,
    groups: ModelGroups,
    target: ExportTarget,
    check: Check = skip_check,
) -> ExportReport:
    """Write the model whose parts all ranks hold in `state`, by our global names. All ranks call it together.

    An older export of that name is replaced, and is there until the new one is complete and checked.
    """
    gathering = plan_gathering(state, table, groups)
    shards = _plan_rank_shards(gathering, target)
    other_shards = plan_shards(target.parts.entries, target.most_shard_bytes) if groups.rank == 0 else []
    all_entries = [entry for entries in (*shards, *other_shards) for entry in entries]
    rank_plan = _RankPlan(len(shards) + len(other_shards), sum(entry.size_bytes for entry in all_entries))
    plans = messages.all_gather_values(rank_plan, _PLAN, groups.world)
    if groups.rank == 0:
        _prepare_folder(gathering, target, sum(plan.bytes for plan in plans))
    files = shard_file_names([plan.files for plan in plans], groups.rank)
    # No rank writes before the folder is there.
    messages.wait_for_group(groups.world)
    counter = ShareCounter(len(all_entries) + len([*gathering.held_parameters()]), target.report_share)
    written_files = _write_shards(gathering, target, dict(zip(files, shards, strict=False)), counter)
    written_files += [
        target.parts.write_shard(target.unfinished_folder / file, entries, counter.add)
        for file, entries in zip(files[len(shards) :], other_shards, strict=True)
    ]
    for written_file in written_files:
        verify(target.unfinished_folder / written_file.file, written_file.entries, written_file.checksums)
    all_files = messages.gather_values(written_files, _WRITTEN, groups.world)
    report = None if all_files is None else complete_export(table, target, list(chain.from_iterable(all_files)))
    messages.wait_for_group(groups.world)
    _import_again(gathering, target, counter)
    check(target.unfinished_folder)
    # No rank replaces an export that another has found to differ.
    messages.wait_for_group(groups.world)
    if groups.rank == 0:
        publish_folder(Disk(), target.unfinished_folder, target.folder)
    return messages.broadcast_value(report, _REPORT, groups.world)


def _plan_rank_shards(gathering: TensorGathering, target: ExportTarget) -> list[list[TensorEntry]]:
    table = gathering.table
    entries = [
        TensorEntry(target.parts.published_name(name), piece.shape, _export_dtype(piece, gathering, target))
        for piece in gathering.owned_pieces()
        for name in published_names(piece, table)
    ]
    return plan_shards(entries, target.most_shard_bytes)


def _export_dtype(piece: TensorPiece, gathering: TensorGathering, target: ExportTarget) -> torch.dtype:
    parameter = gathering.table.by_name[piece.parameter]
    if target.dtype is None or parameter.is_buffer:
        return gathering.state[parameter.name].dtype
    return target.dtype


def shard_file_names(counts: Sequence[int], rank: int) -> list[str]:
    """Return the names of a rank's files, given how many each rank has."""
    total, first = sum(counts), sum(counts[:rank])
    if total == 1:
        return [SINGLE_FILE] * counts[rank]
    return [f"model-{first + index:05}-of-{total:05}.safetensors" for index in range(1, counts[rank] + 1)]


def _prepare_folder(gathering: TensorGathering, target: ExportTarget, needed_bytes: int) -> None:
    # Reading weights may assemble them, which takes all ranks: read none without need.
    dtype = target.dtype or max(gathering.state.values(), key=Tensor.numel).dtype
    prepare_export_folder(target, gathering.table.shape, dtype, needed_bytes)


def prepare_export_folder(target: ExportTarget, shape: ModelShape, dtype: torch.dtype, needed_bytes: int) -> None:
    """Make the unfinished folder, and find every error that shows before hours of writing."""
    shutil.rmtree(target.unfinished_folder, ignore_errors=True)
    target.unfinished_folder.mkdir(parents=True)
    free_bytes = shutil.disk_usage(target.unfinished_folder).free
    if free_bytes < needed_bytes:
        message = f"the export needs {needed_bytes:,} bytes and {free_bytes:,} are free; make room and try again"
        raise OSError(errno.ENOSPC, message, str(target.folder))
    copy_config_and_tokenizer(target.template, target.unfinished_folder, shape, dtype)


def _write_shards(
    gathering: TensorGathering, target: ExportTarget, shards: Mapping[str, list[TensorEntry]], counter: ShareCounter
) -> list[WrittenFile]:
    tensors = _export_tensors(gathering, target, counter)
    written_files = []
    for file, entries in shards.items():
        with open_shard_writer(target.unfinished_folder / file, entries) as opened_shard:
            checksums = {name: opened_shard.write(name, tensor) for name, tensor in islice(tensors, len(entries))}
            opened_shard.sync()
        written_files.append(WrittenFile(file, tuple(entries), checksums))
    # The others may still need this rank's parts.
    deque(tensors, maxlen=0)
    return written_files


def _export_tensors(
    gathering: TensorGathering, target: ExportTarget, counter: ShareCounter
) -> Iterator[tuple[str, Tensor]]:
    for piece, tensor in gathering.tensors():
        cast = tensor.to(_export_dtype(piece, gathering, target))
        for name in published_names(piece, gathering.table):
            yield target.parts.published_name(name), cast
            counter.add(1)


def complete_export(table: TensorTable, target: ExportTarget, written_files: Sequence[WrittenFile]) -> ExportReport:
    """Add the index, and hold the files against the model's table."""
    folder = target.unfinished_folder
    _require_each_once(table, target.parts, written_files)
    entries = {
        entry.name: (written_file.file, entry) for written_file in written_files for entry in written_file.entries
    }
    if len(written_files) > 1:
        Disk().write(folder / INDEX_FILE, _index_json(entries).encode())
    # The check of every import: number, names, shapes and types of all tensors.
    open_published_checkpoint(folder, table)
    return ExportReport(
        folder=target.folder,
        files=tuple(sorted(written.file for written in written_files)),
        bytes=sum(entry.size_bytes for _, entry in entries.values()),
        checksums={name: checksum for written in written_files for name, checksum in written.checksums.items()},
    )


def _import_again(gathering: TensorGathering, target: ExportTarget, counter: ShareCounter) -> None:
    """Read back this rank's own part of the tensors it put together, and compare it to the bit."""
    source, coordinates = (
        open_published_checkpoint(target.unfinished_folder, gathering.table),
        gathering.groups.coordinates,
    )
    local_parameters = {piece.parameter for piece, _ in gathering.local_pieces()}
    for parameter in gathering.held_parameters():
        # Reading a weight may assemble it, which takes all ranks.
        weight = gathering.state[parameter.name].detach()
        if parameter.name in local_parameters and not source.has_equal_values(
            weight, parameter, local_slices(parameter, coordinates)
        ):
            raise CorruptExport(
                f"{target.unfinished_folder}: importing {parameter.name} would give other values than rank "
                f"{gathering.groups.rank} holds: its parts were put together wrongly; an older export stays as it was"
            )
        counter.add(1)


def _require_each_once(table: TensorTable, parts: PublishedParts, written_files: Sequence[WrittenFile]) -> None:
    trained = (parts.published_name(name) for piece in table.pieces for name in published_names(piece, table))
    expected = Counter(chain(trained, (entry.name for entry in parts.entries)))
    actual = Counter(entry.name for written_file in written_files for entry in written_file.entries)
    if actual != expected:
        miscounted = join_names(actual - expected) or join_names(expected - actual)
        raise RuntimeError(f"{len(actual)} tensors were written, {len(expected)} expected; not once: {miscounted}")


def _index_json(entries: Mapping[str, tuple[str, TensorEntry]]) -> str:
    total = sum(entry.size_bytes for _, entry in entries.values())
    places = {name: file for name, (file, _) in sorted(entries.items())}
    return json.dumps({"metadata": {"total_size": total}, "weight_map": places}, indent=2) + "\n"


@contextmanager
def remove_on_failure(unfinished: Path) -> Iterator[None]:
    """Remove the unfinished folder afterwards; a complete export has its final name by then."""
    try:
        yield
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
