"""The state of model and optimizer in files: every rank writes the shards that it holds, and reads those it needs.

A file holds shards and their places in the whole tensors: a save gathers nothing, and any layout reads the files of any
other. Megatron's own format gathers the whole optimizer at every save, and loses its moments when the expert group's
size changes to or from one. Knows nothing of steps, markers or retention.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter
from torch import Tensor

from moejob_api.job import Spec
from moejob_api.layout.ranks import ParallelGroup as LayoutGroup
from moejob_trainer.checkpoints.shards import ShardSpec, shards_of_range
from moejob_trainer.conversion.safetensors_writer import TensorEntry, open_shard_writer
from moejob_trainer.conversion.tensor_table import slice_lengths
from moejob_trainer.distributed import messages
from moejob_trainer.distributed.groups import Group
from moejob_trainer.megatron.master_weights import PlainNumbers, StoredNumbers, copy_to_host
from moejob_trainer.megatron.optimizer import OptimizerShard, is_counted_here
from moejob_trainer.megatron.shares import find_sharding, local_shards
from moejob_trainer.megatron.state_copies import StateCopy
from moejob_trainer.megatron.stored_shards import SHARDS, ShardFiles, StoredShard, TensorRole, require_shape, shards_in
from moejob_trainer.megatron.training_engine import MegatronTrainingEngine
from moejob_trainer.megatron.weights import part_slices, rank_coordinates
from moejob_trainer.model.adapters import adapter_parameters, is_adapter
from moejob_trainer.model.parameters import Parameter, divided_axes
from moejob_trainer.model.stage import ModelStage, WeightPart
from moejob_trainer.runtime.heartbeats import ShareCounter, ShareReport, ignore_share
from moejob_trainer.runtime.read_ahead import read_ahead


@dataclass(frozen=True, slots=True)
class HeldShard:
    """A shard of one tensor of the whole model, with this rank's memory of it."""

    kind: TensorRole
    name: str
    shard: ShardSpec
    # Flat; writing to them sets the state.
    values: StoredNumbers
    # Whether this rank writes it; others may hold the same.
    is_own: bool


# Two cores read as fast with four threads as with two; hosts of GPUs have more cores, and several ranks.
_READERS = 4
_SHARE = TypeAdapter(list[StoredShard])


def saved_parameters(declared: Sequence[Parameter], spec: Spec) -> tuple[Parameter, ...]:
    """Return the parameters of a checkpoint: under adapters, without frozen weights that the published model holds."""
    lora = spec.training.lora
    if lora is None:
        return tuple(declared)
    # No published model has the weights of another job; the selection bias changes even beside frozen weights.
    is_published = spec.checkpoint.resume_from is None
    base_parameters = (parameter for parameter in declared if parameter.is_buffer or not is_published)
    return (*base_parameters, *adapter_parameters(declared, lora))


class StateFiles:
    """Writes and reads the state of one engine."""

    def __init__(self, engine: MegatronTrainingEngine, parameters: Sequence[Parameter], background: Executor) -> None:
        self.engine, self.background = engine, background
        self.parameters = {parameter.name: parameter for parameter in parameters}

    def prepare(self) -> None:
        """Start to allocate the host memory for saves beside the training."""
        if self.engine.spec.checkpoint.asynchronous:
            self.engine.copies.prepare_memory([held.values for held in self._owned_shards()])

    def start_writing(self, folder: Path) -> PendingFiles:
        """Start to write this rank's part: with an asynchronous save, a copy of it that is made beside the training.

        In a synchronous save training waits, and no more than one tensor is copied at a time.
        """
        owned = self._owned_shards()
        values = [held.values for held in owned]
        copy = self.engine.copies.start_copy(values) if self.engine.spec.checkpoint.asynchronous else None
        tensors = partial(_copy_one_by_one, values) if copy is None else copy.make_copies
        file = self._describe_file(folder, owned)
        return PendingFiles(file.path.name, self.background.submit(_write_file, tensors, file), copy)

    def read(self, folder: Path, *, weights_only: bool, report_share: ShareReport = ignore_share) -> None:
        """Set this rank's state, or only its weights, from files of any layout; report the share that is read."""
        kinds = frozenset({TensorRole.WEIGHT}) if weights_only else frozenset(TensorRole)
        self.engine.copies.finish_copy()
        stored = _read_index(folder, self.engine.groups.world)
        files = ShardFiles(folder, _READERS)
        absent = _optional_parameters(self.parameters, stored) if weights_only else frozenset[str]()

        def wanted_shards() -> Iterator[tuple[HeldShard, Sequence[StoredShard]]]:
            for held in self._held_shards():
                if held.kind in kinds and ((held.kind, held.name) in stored or held.name not in absent):
                    of_tensor = stored.get((held.kind, held.name), ())
                    require_shape(self.parameters[held.name], of_tensor, folder)
                    yield held, of_tensor

        elements = sum(held.shard.element_count for held in self._held_shards() if held.kind in kinds)
        counter = ShareCounter(elements, report_share)
        for held, of_tensor in read_ahead(
            wanted_shards(), lambda held_and_stored: files.file_parts(held_and_stored[0].shard, held_and_stored[1])
        ):
            target = held.values.writable_buffer()
            files.fill_shard(target.view(held.shard.size), held.shard, of_tensor, f"{held.kind} of {held.name}")
            held.values.write(target)
            counter.add(held.shard.element_count)
        self.engine.optimizer.gather_weights()

    def leave_published(self) -> None:
        """Leave frozen weights of the published model out of all later saves and reads."""
        self.parameters = {
            name: parameter for name, parameter in self.parameters.items() if parameter.is_buffer or is_adapter(name)
        }

    def counters(self) -> Mapping[str, int]:
        """Return the number of updates, and of those that changed the weights."""
        return {"updates": self.engine.updates, "applied": self.engine.optimizer.steps}

    def set_counters(self, counters: Mapping[str, int]) -> None:
        """Resume the numbers of updates, and of those that changed the weights."""
        self.engine.updates, self.engine.optimizer.steps = counters["updates"], counters["applied"]

    # --- what this rank holds ---------------------------------------------------------------------------------------

    def _describe_file(self, folder: Path, owned: Sequence[HeldShard]) -> _StateFile:
        path = folder / f"state-{self.engine.groups.world.rank:05d}.safetensors"
        tensors = tuple(TensorEntry(str(n), held.shard.size, held.values.dtype) for n, held in enumerate(owned))
        return _StateFile(path, tensors, {SHARDS: json.dumps([self._shard_metadata(held) for held in owned])})

    def _shard_metadata(self, held: HeldShard) -> Mapping[str, Any]:
        """Return the metadata of one tensor of a file."""
        shape = self.parameters[held.name].shape
        return {
            "kind": held.kind,
            "name": held.name,
            "shape": shape,
            "start": held.shard.start,
            "size": held.shard.size,
        }

    def _owned_shards(self) -> Sequence[HeldShard]:
        return [held for held in self._held_shards() if held.is_own]

    def _held_shards(self) -> Iterator[HeldShard]:
        stage_of = {parameter: stage for stage in self.engine.stages for parameter in stage.parameters()}
        for piece in self.engine.optimizer.pieces:
            yield from self._optimizer_shards(piece, stage_of[piece.parameter])
        for stage in self.engine.stages:
            updated = {
                part.name
                for name, parameter in stage.named_parameters()
                if parameter.requires_grad
                for part in stage.stored_parts(name)
            }
            for part, tensor in stage.weight_parts():
                if part.name not in updated and part.name in self.parameters:
                    yield from self._unchanged_shards(part, tensor)

    def _optimizer_shards(self, piece: OptimizerShard, stage: ModelStage) -> Iterator[HeldShard]:
        states: Mapping[TensorRole, StoredNumbers] = {
            TensorRole.WEIGHT: piece.master,
            TensorRole.FIRST_MOMENT: PlainNumbers(piece.first_moment),
            TensorRole.SECOND_MOMENT: PlainNumbers(piece.second_moment),
        }
        # Replicas of a piece lie on other tensor ranks, or at the other end of a tied model.
        is_own = is_counted_here(piece.parameter, self.engine.groups)
        begin = 0
        for part, shard in self._piece_shards(piece, stage):
            end = begin + shard.element_count
            for kind, values in states.items():
                yield HeldShard(kind, part.name, shard, values.slice_range(begin, end), is_own)
            begin = end

    def _piece_shards(self, piece: OptimizerShard, stage: ModelStage) -> Iterator[tuple[WeightPart, ShardSpec]]:
        """Yield the shards of a piece in the order of its numbers: a parameter may be parts of several tensors."""
        place, first = rank_coordinates(self.engine.groups), 0
        for part in stage.stored_parts(piece.name):
            region = part_slices(part, self.parameters[part.name], place)
            shape = slice_lengths(region)
            start, stop = max(piece.start, first), min(piece.stop, first + math.prod(shape))
            if start < stop:
                for shard in shards_of_range(shape, start - first, stop - first):
                    yield part, shard.shift_by([axis.start for axis in region])
            first += math.prod(shape)

    def _unchanged_shards(self, part: WeightPart, tensor: Tensor) -> Iterator[HeldShard]:
        """Yield the tensors that no update changes: frozen weights, and the bias on the choice of experts."""
        parameter, groups = self.parameters[part.name], self.engine.groups
        origin = [axis.start for axis in part_slices(part, parameter, rank_coordinates(groups))]
        is_of_experts = any(group is not LayoutGroup.TENSOR for _, group in parameter.divided)
        replicas, holders = (
            (groups.expert_replicas, groups.expert_tensor) if is_of_experts else (groups.replicas, groups.tensor)
        )
        is_whole = not divided_axes(parameter, rank_coordinates(groups))
        is_own = not is_whole or holders.rank == 0
        if find_sharding(tensor) is None:
            is_own = is_own and replicas.rank == 0
        for shard, values in local_shards(tensor):
            yield HeldShard(TensorRole.WEIGHT, part.name, shard.shift_by(origin), PlainNumbers(values.view(-1)), is_own)


@dataclass(frozen=True, slots=True)
class PendingFiles:
    """A file that is being written."""

    name: str
    writing: Future[None]
    # The copy that is written; None where training waits for the file.
    copy: StateCopy | None

    @property
    def waited_seconds(self) -> float:
        """Seconds for which an update has waited for the copy."""
        return 0.0 if self.copy is None else self.copy.waited_seconds

    def is_finished(self) -> bool:
        """Return whether the file is written; raises what failed."""
        if not self.writing.done():
            return False
        self.writing.result()
        return True

    def names(self) -> Sequence[str]:
        """The files that this rank wrote."""
        return [self.name]


@dataclass(frozen=True, slots=True)
class _StateFile:
    """A file that is to be written: its tensors in order, and its metadata."""

    path: Path
    tensors: Sequence[TensorEntry]
    metadata: Mapping[str, str]


def _copy_one_by_one(values: Sequence[StoredNumbers]) -> Iterator[Tensor]:
    return map(copy_to_host, values)


def _write_file(tensors: Callable[[], Iterable[Tensor]], file: _StateFile) -> None:
    # Before the file is opened: an update waits for the copy, which has to be made even if the disk is full.
    copied = tensors()
    with open_shard_writer(file.path, file.tensors, file.metadata) as writer:
        for entry, tensor in zip(file.tensors, copied, strict=True):
            writer.put_tensor(entry.name, tensor)
        writer.sync()


def _read_index(folder: Path, world: Group) -> Mapping[tuple[TensorRole, str], list[StoredShard]]:
    """Return every shard of a checkpoint; each rank reads the headers of its share of the files."""
    files = sorted(path.name for path in folder.glob("state-*.safetensors"))
    share = [stored for file in files[world.rank :: world.size] for stored in shards_in(folder, file)]
    all_shards = messages.all_gather_values(share, _SHARE, world.handle if world.size > 1 else None)
    index: dict[tuple[TensorRole, str], list[StoredShard]] = {}
    for stored in (stored for rank_shards in all_shards for stored in rank_shards):
        index.setdefault((stored.kind, stored.name), []).append(stored)
    return index


def _optional_parameters(names: Iterable[str], stored: Iterable[tuple[TensorRole, str]]) -> frozenset[str]:
    """Return the parameters that may be missing in another job's checkpoint, for a job with adapters.

    A checkpoint with adapters may lack all other weights: those are the published ones. A checkpoint without adapters
    lacks the adapters, which then start from zero.
    """
    adapter_names = {name for name in names if is_adapter(name)}
    if not adapter_names:
        return frozenset()
    return frozenset(names) - adapter_names if any(is_adapter(name) for _, name in stored) else frozenset(adapter_names)
