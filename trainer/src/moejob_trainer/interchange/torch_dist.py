"""Megatron's torch_dist checkpoints, read and written tensor by tensor.

An entry stacks one parameter of all layers along a first axis, and of all experts along the next. Layers that differ
have entries of their own. Qwen3-MoE's `decoder.layers.mlp.experts.experts.linear_fc2.weight` is
[layers, experts, hidden, width], DeepSeek's `decoder.layers.3.mlp.experts.experts.linear_fc2.weight` [experts, ...].
"""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType
from torch.distributed.checkpoint.state_dict_saver import save

from moejob_api.models.reader import shown_value
from moejob_trainer.conversion.checkpoint import join_names, unusable_checkpoint
from moejob_trainer.interchange import checkpoint_index
from moejob_trainer.interchange.checkpoint_index import IndexedTensor, StoredPart
from moejob_trainer.interchange.foreign_files import open_regular, read_json_object
from moejob_trainer.interchange.stored_tensor import DTYPES, RefusedTensor, read_stored_tensor

FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_FORMAT_FILE, _INDEX_FILE = "metadata.json", ".metadata"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d*)")
_EXPERTS = "mlp.experts.experts"
_TRACKER = re.compile(r"[0-9]{1,12}|release")
_TENSORS = TypeAdapter(dict[str, IndexedTensor])


@dataclass(frozen=True, slots=True)
class IndexedKey:
    """The place of a tensor: a key, and its index along the axes by which layers and experts are stacked."""

    key: str
    index: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class StackSizes:
    """The numbers of layers and experts; whether layers are stacked."""

    layers: int
    experts: int
    are_layers_stacked: bool

    def axis_lengths(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """Return the lengths of the axes that an index is along."""
        all_lengths = (self.layers, self.experts) if self.are_layers_stacked else (self.experts,)
        return all_lengths[: len(index)]


def locate_tensor(name: str, stacks: StackSizes) -> IndexedKey:
    """Return the place of a Megatron tensor: `decoder.layers.3.mlp.linear_fc2.weight` is [3] of a stack of layers."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return IndexedKey(name)
    number, suffix = int(layer[1]), layer[2]
    expert = _EXPERT.fullmatch(suffix)
    index: tuple[int, ...] = ()
    if expert is not None:
        # Without a number it is the stack of all experts.
        suffix = f"{_EXPERTS}.{expert[1]}.{expert[2]}"
        index = (int(expert[3]),) if expert[3] else ()
    if stacks.are_layers_stacked:
        return IndexedKey(f"decoder.layers.{suffix}", (number, *index))
    return IndexedKey(f"decoder.layers.{number}.{suffix}", index)


def find_iteration_folder(path: Path) -> Path:
    """Return the folder of the newest iteration below a checkpoint's folder, or the folder itself."""
    if (path / _INDEX_FILE).is_file():
        return path
    tracker = path / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        raise unusable_checkpoint(
            f"{path} is no checkpoint of Megatron's: it has neither {_INDEX_FILE} nor {tracker.name}"
        )
    newest = _read_tracker(tracker)
    folder = path / (f"iter_{int(newest):07}" if newest.isdigit() else newest)
    if not (folder / _INDEX_FILE).is_file():
        raise unusable_checkpoint(
            f"{tracker} names {newest}, but {folder} has no {_INDEX_FILE}; copy the checkpoint again"
        )
    return folder


def _read_tracker(tracker: Path) -> str:
    """Return the iteration that a tracker names: a number, or `release`."""
    with open_regular(tracker) as tracker_file:
        newest = tracker_file.read(100).decode(errors="replace").strip()
    if not _TRACKER.fullmatch(newest):
        raise unusable_checkpoint(
            f"{tracker} names {newest!r}, neither an iteration nor release; copy the checkpoint again"
        )
    return newest


class TorchDistReader:
    """The tensors of one checkpoint. Reads the index when opened, and afterwards only the requested tensors."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _require_format(folder)
        self._tensors = _read_checkpoint_index(folder / _INDEX_FILE)
        self.sizes: Mapping[str, tuple[int, ...]] = {key: tensor.size for key, tensor in self._tensors.items()}
        self._by_index: dict[tuple[str, int], dict[tuple[int, ...], list[StoredPart]]] = {}

    def tensor_dtype(self, key: str) -> torch.dtype:
        """Return the type of a tensor's elements."""
        return DTYPES[self._tensors[key].dtype]

    def require_types(self, keys: Iterable[str]) -> None:
        """Refuse tensors of types that no model of ours has."""
        unsupported = {f"{key} ({self._tensors[key].dtype})" for key in keys if self._tensors[key].dtype not in DTYPES}
        if unsupported:
            raise unusable_checkpoint(
                f"{self.folder} holds {join_names(unsupported)}; save the weights as one of {', '.join(DTYPES)}"
            )

    def read_tensor(self, indexed_key: IndexedKey) -> Tensor:
        """Return one tensor, without the axes by which it is stacked."""
        inside = self.sizes[indexed_key.key][len(indexed_key.index) :]
        region = tuple(slice(at, at + 1) for at in indexed_key.index) + tuple(slice(0, size) for size in inside)
        parts = [part for part in self._parts_near(indexed_key) if _overlapping_region(part, region) is not None]
        try:
            self._require_complete(indexed_key.key, parts, region)
            target = torch.full(
                [axis.stop - axis.start for axis in region], torch.nan, dtype=self.tensor_dtype(indexed_key.key)
            )
            for part in parts:
                self._copy_part(part, self.tensor_dtype(indexed_key.key), region, target)
        except (OSError, RefusedTensor) as error:
            raise unusable_checkpoint(
                f"{self.folder}: {indexed_key.key} cannot be read ({error}); copy the checkpoint again"
            ) from error
        return target.reshape(inside)

    def _parts_near(self, indexed_key: IndexedKey) -> Sequence[StoredPart]:
        """Return the parts that may hold a place: one of 12,032 if each of 128 experts of 94 layers has its own."""
        axes = len(indexed_key.index)
        if (indexed_key.key, axes) not in self._by_index:
            by_index: dict[tuple[int, ...], list[StoredPart]] = {}
            for part in self._tensors[indexed_key.key].parts:
                is_single = all(size == 1 for size in part.sizes[:axes])
                by_index.setdefault(part.offsets[:axes] if is_single else (), []).append(part)
            self._by_index[indexed_key.key, axes] = by_index
        by_index = self._by_index[indexed_key.key, axes]
        return by_index.get(indexed_key.index, []) + (by_index.get((), []) if axes else [])

    def _require_complete(self, key: str, parts: Sequence[StoredPart], region: tuple[slice, ...]) -> None:
        """Refuse parts that leave a gap, or promise more than their files hold, before a tensor takes memory."""
        overlaps = [_overlapping_region(part, region) for part in parts]
        elements = sum(prod(axis.stop - axis.start for axis in overlap) for overlap in overlaps if overlap is not None)
        starts = {part.offsets for part in parts}
        if len(starts) != len(parts) or elements != prod(axis.stop - axis.start for axis in region):
            raise RefusedTensor("parts of it are missing or there twice")
        for part in parts:
            held_bytes, needed_bytes = part.length, prod(part.sizes) * self.tensor_dtype(key).itemsize
            if needed_bytes > held_bytes:
                raise RefusedTensor(f"{part.file} has {held_bytes:,} bytes for a part that takes {needed_bytes:,}")
        on_disk = sum(self._file_bytes(file) for file in {part.file for part in parts})
        if sum(part.length for part in parts) > on_disk:
            raise RefusedTensor("its parts are longer than their files")

    def _file_bytes(self, file: str) -> int:
        with open_regular(self.folder / file) as part_file:
            return os.fstat(part_file.fileno()).st_size

    def _copy_part(self, part: StoredPart, dtype: torch.dtype, region: tuple[slice, ...], target: Tensor) -> None:
        with open_regular(self.folder / part.file) as part_file:
            tensor = read_stored_tensor(part_file, part.start, part.length)
        if tensor.dtype != dtype or tuple(tensor.shape) != part.sizes:
            raise RefusedTensor(f"{part.file} holds {tensor.dtype} {list(tensor.shape)}, and the index says otherwise")
        overlap = _overlapping_region(part, region)
        if overlap is None:
            return
        source = tuple(slice(axis.start - at, axis.stop - at) for axis, at in zip(overlap, part.offsets, strict=True))
        starts = (axis.start for axis in region)
        into = tuple(slice(axis.start - at, axis.stop - at) for axis, at in zip(overlap, starts, strict=True))
        target[into] = tensor[source]


def _overlapping_region(part: StoredPart, region: tuple[slice, ...]) -> tuple[slice, ...] | None:
    """Return the overlap of a part and a region of a tensor; None where they have none."""
    if len(part.offsets) != len(region):
        return None
    common = tuple(
        slice(max(axis.start, start), min(axis.stop, start + size))
        for axis, start, size in zip(region, part.offsets, part.sizes, strict=True)
    )
    return common if all(axis.start < axis.stop for axis in common) else None


@dataclass(frozen=True, slots=True)
class PlannedTensor:
    """A tensor to write; the writer makes it at the last moment."""

    indexed_key: IndexedKey
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


class _PortableWriter(FileSystemWriter):
    """Names its folder in the index as text: Python 3.13 pickles a path under a name that Python 3.12 does not know."""

    def storage_meta(self) -> described.StorageMeta | None:
        """Return the facts about this checkpoint that its index has."""
        meta = super().storage_meta()
        return None if meta is None else replace(meta, checkpoint_id=str(meta.checkpoint_id))


def write_checkpoint(folder: Path, tensors: Sequence[PlannedTensor], stacks: StackSizes) -> None:
    """Write a checkpoint of these tensors, holding one of them at a time."""
    # One file: a second thread would hold a second tensor.
    save({}, storage_writer=_PortableWriter(folder), planner=_OneByOnePlanner(tensors, stacks), no_dist=True)
    format_facts = FORMAT | {"common_backend": "torch", "common_backend_version": 1}
    (folder / _FORMAT_FILE).write_text(json.dumps(format_facts), encoding="utf-8")
    torch.save({"checkpoint_version": 3.0, "iteration": 0, "content_metadata": {}}, folder / "common.pt")


def extra_state_keys(places: Iterable[IndexedKey], stacks: StackSizes) -> list[str]:
    """Return the keys of modules' extra states: Megatron loads no checkpoint that lacks one of them."""
    modules = {
        (indexed_key.key.rpartition(".")[0], index)
        for indexed_key in places
        for index in _module_indexes(indexed_key, stacks)
    }
    attention = {(key.replace(".linear_proj", ".core_attention"), index) for key, index in modules}
    shards = [
        (key, _dotted_numbers(index or (0,)), _dotted_numbers(stacks.axis_lengths(index) or (1,)))
        for key, index in sorted(modules | attention)
    ]
    return [f"{key}._extra_state/shard_{index}_{lengths}" for key, index, lengths in shards]


def _module_indexes(indexed_key: IndexedKey, stacks: StackSizes) -> Iterator[tuple[int, ...]]:
    """Yield the index of each module that has a part of a tensor: each expert is one, also of a stack of experts."""
    is_stack = f"{_EXPERTS}." in indexed_key.key and len(indexed_key.index) == stacks.are_layers_stacked
    yield from ((*indexed_key.index, expert) for expert in range(stacks.experts)) if is_stack else (indexed_key.index,)


def _dotted_numbers(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


class _OneByOnePlanner(SavePlanner):
    """Make each tensor just before writing it."""

    def __init__(self, tensors: Sequence[PlannedTensor], stacks: StackSizes) -> None:
        self.stacks = stacks
        self.tensors = {self._tensor_index(tensor): tensor for tensor in tensors}
        self.extra_states = extra_state_keys((tensor.indexed_key for tensor in tensors), stacks)

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        """There is no state dict."""

    def create_local_plan(self) -> SavePlan:
        states = [WriteItem(described.MetadataIndex(key), WriteItemType.BYTE_IO) for key in self.extra_states]
        return SavePlan([self._write_item(index, tensor) for index, tensor in self.tensors.items()] + states)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], described.Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            empty_state = io.BytesIO()
            torch.save([None], empty_state)
            return empty_state
        tensor = self.tensors[write_item.index.fqn, tuple(write_item.index.offset or ())]
        return tensor.make().reshape(self._chunk_sizes(tensor)).contiguous()

    def _write_item(self, index: tuple[str, tuple[int, ...]], tensor: PlannedTensor) -> WriteItem:
        key, offsets = index
        chunk = described.ChunkStorageMetadata(torch.Size(offsets), torch.Size(self._chunk_sizes(tensor)))
        full_size = torch.Size((*self.stacks.axis_lengths(tensor.indexed_key.index), *tensor.shape))
        data = TensorWriteData(chunk, described.TensorProperties(dtype=tensor.dtype), full_size)
        return WriteItem(described.MetadataIndex(key, torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data)

    @staticmethod
    def _tensor_index(tensor: PlannedTensor) -> tuple[str, tuple[int, ...]]:
        return tensor.indexed_key.key, (*tensor.indexed_key.index, *(0 for _ in tensor.shape))

    @staticmethod
    def _chunk_sizes(tensor: PlannedTensor) -> tuple[int, ...]:
        return (*(1 for _ in tensor.indexed_key.index), *tensor.shape)


def _read_checkpoint_index(file: Path) -> dict[str, IndexedTensor]:
    try:
        with open_regular(file) as index_file:
            size = os.fstat(index_file.fileno()).st_size
            if size > checkpoint_index.MOST_BYTES:
                raise unusable_checkpoint(
                    f"{file} has {size:,} bytes; an index has {checkpoint_index.MOST_BYTES:,} at most"
                )
            command = [sys.executable, "-I", "-m", checkpoint_index.__name__, str(size)]
            # An empty environment: the process that reads a stranger's bytes knows none of the user's secrets.
            reply = subprocess.run(
                command, stdin=index_file, capture_output=True, env={}, timeout=checkpoint_index.SECONDS, check=False
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise unusable_checkpoint(f"{file} cannot be read ({error}); copy the checkpoint again") from error
    if reply.returncode:
        raise unusable_checkpoint(
            f"{file} is no index of a checkpoint ({_index_failure_reason(reply)}); copy the checkpoint again"
        )
    return _TENSORS.validate_json(reply.stdout)


def _index_failure_reason(reply: subprocess.CompletedProcess[bytes]) -> str:
    last_words = reply.stderr.decode(errors="replace").strip()
    if reply.returncode == checkpoint_index.REFUSED:
        return last_words
    # Python's own end of a process that could not begin: the index is not to blame.
    if reply.returncode == 1 and last_words:
        return f"the process that reads it ended with {last_words.splitlines()[-1][-300:]!r}"
    return f"reading it takes more memory or time than an index of its size does, exit code {reply.returncode}"


def _require_format(folder: Path) -> None:
    format_facts = read_json_object(folder / _FORMAT_FILE)
    backend = format_facts.get("sharded_backend")
    if backend != FORMAT["sharded_backend"]:
        raise unusable_checkpoint(
            f"{folder} is a checkpoint of {shown_value(backend)}; save it as torch_dist with Megatron"
        )


def model_keys(reader: TorchDistReader) -> Iterator[str]:
    """Yield the keys of a model's tensors: an optimizer's keys begin otherwise."""
    return (key for key in reader.sizes if key.startswith(("decoder.", "embedding.", "output_layer.")))
