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
from moejob_trainer.conversion.adapters import AdapterTarget, adapter_table, write_adapters
from moejob_trainer.conversion.families import Table, table
from moejob_trainer.conversion.gathering import names
from moejob_trainer.conversion.loading import Source, opened
from moejob_trainer.conversion.model_export import (
    MOST_SHARD_BYTES,
    ExportReport,
    Target,
    WrittenFile,
    complete,
    file_names,
    prepare,
    removed_on_failure,
)
from moejob_trainer.conversion.safetensors_writer import (
    ShardWriter,
    TensorEntry,
    hashing_threads,
    planned,
    shard_writer,
    verify,
)
from moejob_trainer.conversion.tensor_table import Piece
from moejob_trainer.data import tiny
from moejob_trainer.errors import BadConfiguration
from moejob_trainer.model.pretrained import fetch
from moejob_trainer.runtime.disk import Disk, publish_folder


@dataclass(frozen=True, slots=True)
class Wanted:
    """The form of an export. `dtype` None: the job's; `base` None: published weights lie where the job says."""

    folder: Path
    merge_adapters: bool = False
    dtype: torch.dtype | None = None
    base: Path | None = None
    most_shard_bytes: int = MOST_SHARD_BYTES


@dataclass(slots=True)
class BoundedMemory:
    """Bytes that threads may hold together. A thread that needs more than all of them runs alone."""

    most_bytes: int
    _held_bytes: int = 0
    _changed: Condition = field(default_factory=Condition)

    @contextmanager
    def of(self, needed_bytes: int) -> Iterator[None]:
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


def export_run(run: StoredRun, wanted: Wanted) -> str:
    """Export a run's checkpoint; return one line that says what was written."""
    if wanted.folder.exists():
        raise BadConfiguration(f"{wanted.folder} exists; name another folder, or remove it")
    if run.adapters.lora is None and wanted.merge_adapters:
        raise BadConfiguration(f"{run.checkpoint.path} holds no adapters; leave out --merge-adapters")
    if run.adapters.lora is not None and not wanted.merge_adapters:
        return _export_adapters(run, wanted)
    report = export_model(run, wanted)
    return (
        f"wrote {wanted.folder}: step {run.checkpoint.folder.step}, {len(report.checksums)} tensors, "
        f"{report.bytes:,} bytes, each read back and compared"
    )


def export_model(run: StoredRun, wanted: Wanted) -> ExportReport:
    """Write every tensor of the model, with a few of them in memory, or one that is large."""
    declared = table(run.shape)
    tensors = _merged(run, declared, wanted) if run.adapters.lora else _weights(run, declared)
    dtype = wanted.dtype or getattr(torch, run.spec.model.dtype.value)
    target = Target(wanted.folder, run.template, dtype, wanted.most_shard_bytes)
    with removed_on_failure(target.unfinished):
        report = _write(tensors, declared, target, dtype)
        publish_folder(Disk(), target.unfinished, target.folder)
    return report


def _export_adapters(run: StoredRun, wanted: Wanted) -> str:
    lora = run.adapters.lora
    if lora is None:
        raise ValueError("the checkpoint holds no adapters")
    if wanted.dtype is not None:
        raise BadConfiguration("adapters are written in float32; leave out --dtype, or add --merge-adapters")
    declared = adapter_table(run.shape, lora)
    tensors = _weights(run, declared)
    target = AdapterTarget(wanted.folder, run.spec.model.source, lora)
    with removed_on_failure(target.unfinished):
        write_adapters(
            {piece.tensor: tensors.tensor(piece, torch.float32) for piece in declared.pieces},
            declared,
            target,
        )
        publish_folder(Disk(), target.unfinished, target.folder, lambda _: True)
    return (
        f"wrote {wanted.folder}: step {run.checkpoint.folder.step}, the adapters of {run.spec.model.source} for PEFT; "
        "--merge-adapters writes the whole model"
    )


def _weights(run: StoredRun, declared: Table) -> CheckpointTensors:
    return CheckpointTensors.open(run.checkpoint.path, declared)


def _merged(run: StoredRun, declared: Table, wanted: Wanted) -> MergedTensors:
    facts = run.adapters
    if facts.lora is None:
        raise ValueError("the checkpoint holds no adapters")
    weights = _weights(run, declared)
    adapters = _weights(run, adapter_table(run.shape, facts.lora))
    base = None if facts.holds_weights else _base(run, declared, wanted)
    return MergedTensors(weights, adapters, facts.lora.alpha / facts.lora.rank, base)


def _base(run: StoredRun, declared: Table, wanted: Wanted) -> Source:
    """The published weights that the adapters belong to."""
    source = run.spec.model.source
    if source == tiny.TOKENIZER:
        raise BadConfiguration(
            f"{source} has no published weights to merge adapters with: each run makes its own from its seed; export "
            "the adapters alone"
        )
    return opened(wanted.base or fetch(run.spec.model, run.template.parent), declared)


def _write(tensors: PublishedTensors, declared: Table, target: Target, dtype: torch.dtype) -> ExportReport:
    pieces = {name: piece for piece in declared.pieces for name in names(piece, declared)}
    entries = [TensorEntry(name, piece.shape, _dtype(piece, declared, dtype)) for name, piece in pieces.items()]
    shards = planned(entries, target.most_shard_bytes)
    prepare(target, declared.shape, dtype, sum(entry.bytes for entry in entries))
    # The other half of a shard is for the file that is read back beside this.
    memory = BoundedMemory(target.most_shard_bytes // 2)
    written, verified = [], []
    with ThreadPoolExecutor(1, "verify") as behind:
        for file, of_file in zip(file_names([len(shards)], 0), shards, strict=True):
            path = target.unfinished / file
            # Threads end before the file closes, also where one of them fails.
            with shard_writer(path, of_file) as shard, hashing_threads() as threads:
                write = partial(_write_one, tensors, memory, shard)
                begun = {one.name: threads.submit(write, pieces[one.name], one) for one in of_file}
                checksums = {name: of_tensor.result() for name, of_tensor in begun.items()}
            verified.append(behind.submit(verify, path, of_file, checksums))
            written.append(WrittenFile(file, tuple(of_file), checksums))
        for of_shard in verified:
            of_shard.result()
    return complete(declared, target, written)


def _write_one(
    tensors: PublishedTensors, memory: BoundedMemory, shard: ShardWriter, piece: Piece, entry: TensorEntry
) -> str:
    with memory.of(prod(entry.shape) * (tensors.bytes_beside + entry.dtype.itemsize)):
        return shard.write(entry.name, tensors.tensor(piece, entry.dtype))


def _dtype(piece: Piece, declared: Table, dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if declared.by_name[piece.parameter].is_buffer else dtype
