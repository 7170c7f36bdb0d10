"""The export of a stored run: the model, merged with its adapters where it is asked for, or the adapters alone.

The export has another name until every tensor has been read back, and is removed when anything fails.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from threading import Condition

import torch

from moejob_trainer.checkpoint_export.run import StoredRun
from moejob_trainer.checkpoint_export.tensors import CheckpointTensors, MergedTensors, PublishedTensors
from moejob_trainer.conversion.adapters import AdapterTarget, build_adapter_table, write_adapters
from moejob_trainer.conversion.families import TensorTable, build_tensor_table
from moejob_trainer.conversion.gathering import published_names
from moejob_trainer.conversion.loading import PublishedCheckpoint, open_published_checkpoint
from moejob_trainer.conversion.model_export import (
    MOST_SHARD_BYTES,
    ExportReport,
    ExportTarget,
    complete_export,
    prepare_export_folder,
    remove_on_failure,
    shard_file_names,
)
from moejob_trainer.conversion.safetensors_writer import (
    ShardWriter,
    TensorEntry,
    WrittenFile,
    hashing_threads,
    open_shard_writer,
    plan_shards,
    verify,
)
from moejob_trainer.conversion.tensor_table import TensorPiece
from moejob_trainer.conversion.text_part import read_other_parts
from moejob_trainer.data import tiny
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.model.pretrained import fetch_model, name_for_others
from moejob_trainer.runtime.disk import Disk, publish_folder
from moejob_trainer.runtime.heartbeats import ShareCounter, ShareReport, ignore_share


@dataclass(frozen=True, slots=True)
class ExportOptions:
    """The form of an export. `dtype` None: the job's; `base` None: published weights lie where the job says."""

    folder: Path
    merge_adapters: bool = False
    dtype: torch.dtype | None = None
    base: Path | None = None
    most_shard_bytes: int = MOST_SHARD_BYTES
    report_share: ShareReport = ignore_share


@dataclass(slots=True)
class BoundedMemory:
    """Bytes that threads may hold together. A thread that needs more than all of them runs alone."""

    most_bytes: int
    _held_bytes: int = 0
    _changed: Condition = field(default_factory=Condition)

    @contextmanager
    def reserve_bytes(self, needed_bytes: int) -> Iterator[None]:
        """Hold these bytes while the block runs; wait until other threads have released enough."""
        with self._changed:
            self._changed.wait_for(lambda: not self._held_bytes or self._held_bytes + needed_bytes <= self.most_bytes)
            self._held_bytes += needed_bytes
        try:
            yield
        finally:
            with self._changed:
                self._held_bytes -= needed_bytes
                self._changed.notify_all()


def export_run(run: StoredRun, options: ExportOptions) -> str:
    """Export a run's checkpoint; return one line that says what was written."""
    if options.folder.exists():
        raise BadConfiguration(f"{options.folder} exists; name another folder, or remove it")
    if run.adapter_facts.lora is None and options.merge_adapters:
        raise BadConfiguration(f"{run.checkpoint.path} holds no adapters; leave out --merge-adapters")
    if run.adapter_facts.lora is not None and not options.merge_adapters:
        return _export_adapters(run, options)
    report = export_whole_model(run, options)
    return (
        f"wrote {options.folder}: step {run.checkpoint.folder.step}, {len(report.checksums)} tensors, "
        f"{report.bytes:,} bytes, each read back and compared"
    )


def export_whole_model(run: StoredRun, options: ExportOptions) -> ExportReport:
    """Write every tensor of the model, with a few of them in memory, or one that is large."""
    tensor_table = build_tensor_table(run.model_shape)
    tensors = (
        _open_merged_weights(run, tensor_table, options) if run.adapter_facts.lora else _open_weights(run, tensor_table)
    )
    dtype = options.dtype or getattr(torch, run.spec.model.dtype.value)
    parts = read_other_parts(run.template, lambda: _find_published_weights(run, options))
    target = ExportTarget(options.folder, run.template, dtype, options.most_shard_bytes, options.report_share, parts)
    with remove_on_failure(target.unfinished_folder):
        report = _write_model(tensors, tensor_table, target, dtype)
        publish_folder(Disk(), target.unfinished_folder, target.folder)
    return report


def _export_adapters(run: StoredRun, options: ExportOptions) -> str:
    lora = run.adapter_facts.lora
    if lora is None:
        raise ValueError("the checkpoint holds no adapters")
    if options.dtype is not None:
        raise BadConfiguration("adapters are written in float32; leave out --dtype, or add --merge-adapters")
    base = name_for_others(run.spec.model, run.template.parent)
    lora_table = build_adapter_table(run.model_shape, lora)
    tensors = _open_weights(run, lora_table)
    target = AdapterTarget(options.folder, base, lora)
    with remove_on_failure(target.unfinished_folder):
        write_adapters(
            {piece.tensor: tensors.tensor(piece, torch.float32) for piece in lora_table.pieces},
            lora_table,
            target,
        )
        publish_folder(Disk(), target.unfinished_folder, target.folder, lambda _: True)
    return (
        f"wrote {options.folder}: step {run.checkpoint.folder.step}, the adapters of {base} for PEFT; "
        "--merge-adapters writes the whole model"
    )


def _open_weights(run: StoredRun, tensor_table: TensorTable) -> CheckpointTensors:
    return CheckpointTensors.open(run.checkpoint.path, tensor_table)


def _open_merged_weights(run: StoredRun, tensor_table: TensorTable, options: ExportOptions) -> MergedTensors:
    facts = run.adapter_facts
    if facts.lora is None:
        raise ValueError("the checkpoint holds no adapters")
    weights = _open_weights(run, tensor_table)
    adapters = _open_weights(run, build_adapter_table(run.model_shape, facts.lora))
    base = None if facts.holds_weights else _open_base_weights(run, tensor_table, options)
    return MergedTensors(weights, adapters, facts.lora.alpha / facts.lora.rank, base)


def _open_base_weights(run: StoredRun, tensor_table: TensorTable, options: ExportOptions) -> PublishedCheckpoint:
    """The published weights that the adapters belong to."""
    source = run.spec.model.source
    if source == tiny.TOKENIZER:
        raise BadConfiguration(
            f"{source} has no published weights to merge adapters with: each run makes its own from its seed; export "
            "the adapters alone"
        )
    return open_published_checkpoint(_find_published_weights(run, options), tensor_table)


def _find_published_weights(run: StoredRun, options: ExportOptions) -> Path:
    return options.base or fetch_model(run.spec.model, run.template.parent)


def _write_model(
    tensors: PublishedTensors, tensor_table: TensorTable, target: ExportTarget, dtype: torch.dtype
) -> ExportReport:
    pieces = {
        target.parts.published_name(name): piece
        for piece in tensor_table.pieces
        for name in published_names(piece, tensor_table)
    }
    entries = [
        TensorEntry(name, piece.shape, _export_dtype(piece, tensor_table, dtype)) for name, piece in pieces.items()
    ]
    shards, other_shards = (plan_shards(each, target.most_shard_bytes) for each in (entries, target.parts.entries))
    files = shard_file_names([len(shards) + len(other_shards)], 0)
    all_entries = [*entries, *target.parts.entries]
    prepare_export_folder(target, tensor_table.shape, dtype, sum(entry.size_bytes for entry in all_entries))
    # The other half of a shard is for the file that is read back beside this.
    memory = BoundedMemory(target.most_shard_bytes // 2)
    written_files, verifications, counter = [], [], ShareCounter(2 * len(all_entries), target.report_share)
    with ThreadPoolExecutor(1, "verify") as verify_pool:
        for file, file_entries in zip(files, shards, strict=False):
            path = target.unfinished_folder / file
            # Threads end before the file closes, also where one of them fails.
            with open_shard_writer(path, file_entries) as shard, hashing_threads() as threads:
                write = partial(_write_tensor, tensors, memory, shard)
                checksum_futures = {
                    tensor_entry.name: threads.submit(write, pieces[tensor_entry.name], tensor_entry)
                    for tensor_entry in file_entries
                }
                checksums = {}
                for name, checksum in checksum_futures.items():
                    checksums[name] = checksum.result()
                    counter.add(1)
            verifications.append((verify_pool.submit(verify, path, file_entries, checksums), len(file_entries)))
            written_files.append(WrittenFile(file, tuple(file_entries), checksums))
        for file, file_entries in zip(files[len(shards) :], other_shards, strict=True):
            path = target.unfinished_folder / file
            written_files.append(target.parts.write_shard(path, file_entries, counter.add))
            verification = verify_pool.submit(verify, path, file_entries, written_files[-1].checksums)
            verifications.append((verification, len(file_entries)))
        for verification, count in verifications:
            verification.result()
            counter.add(count)
    return complete_export(tensor_table, target, written_files)


def _write_tensor(
    tensors: PublishedTensors, memory: BoundedMemory, shard: ShardWriter, piece: TensorPiece, entry: TensorEntry
) -> str:
    with memory.reserve_bytes(prod(entry.shape) * (tensors.extra_bytes_per_element + entry.dtype.itemsize)):
        return shard.write(entry.name, tensors.tensor(piece, entry.dtype))


def _export_dtype(piece: TensorPiece, tensor_table: TensorTable, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if tensor_table.by_name[piece.parameter].is_buffer else dtype
