"""Megatron's torch_dist checkpoints, read and written tensor by tensor.

One parameter of all layers is one entry, stacked along a first axis, and so are the experts of a layer. Layers that
differ have entries of their own. Qwen3-MoE's `decoder.layers.mlp.experts.experts.linear_fc2.weight` is
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
from dataclasses import dataclass
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

from moejob_api.models.reader import shown
from moejob_trainer.conversion.checkpoint import listed, unusable
from moejob_trainer.interchange import checkpoint_index
from moejob_trainer.interchange.checkpoint_index import IndexedTensor, StoredPart
from moejob_trainer.interchange.foreign_files import open_regular, read_json_object
from moejob_trainer.interchange.stored_tensor import DTYPES, RefusedTensor, read_stored_tensor

FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_FORMAT_FILE, _INDEX_FILE = "metadata.json", ".metadata"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")
_TRACKER = re.compile(r"[0-9]{1,12}|release")
_TENSORS = TypeAdapter(dict[str, IndexedTensor])


@dataclass(frozen=True, slots=True)
class IndexedKey:
    """The place of a tensor: a key, and its index along the axes by which layers and experts are stacked."""

    key: str
    index: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Stacks:
    """The numbers of layers and experts; whether layers are stacked."""

    layers: int
    experts: int
    are_layers_stacked: bool

    def lengths(self, index: tuple[int, ...]) -> tuple[int, ...]:
        """Return the lengths of the axes that an index is along."""
        both = (self.layers, self.experts) if self.are_layers_stacked else (self.experts,)
        return both[: len(index)]


def entry(name: str, stacks: Stacks) -> IndexedKey:
    """Return the place of a Megatron tensor: `decoder.layers.3.mlp.linear_fc2.weight` is [3] of a stack of layers."""
    layer = _LAYER.fullmatch(name)
    if layer is None:
        return IndexedKey(name)
    number, rest = int(layer[1]), layer[2]
    expert = _EXPERT.fullmatch(rest)
    index: tuple[int, ...] = ()
    if expert is not None:
        rest, index = f"mlp.experts.experts.{expert[1]}.{expert[2]}", (int(expert[3]),)
    if stacks.are_layers_stacked:
        return IndexedKey(f"decoder.layers.{rest}", (number, *index))
    return IndexedKey(f"decoder.layers.{number}.{rest}", index)


def iteration_folder(path: Path) -> Path:
    """Return the folder of the newest iteration below a checkpoint's folder, or the folder itself."""
    if (path / _INDEX_FILE).is_file():
        return path
    tracker = path / "latest_checkpointed_iteration.txt"
    if not tracker.is_file():
        raise unusable(f"{path} is no checkpoint of Megatron's: it has neither {_INDEX_FILE} nor {tracker.name}")
    newest = _tracked(tracker)
    folder = path / (f"iter_{int(newest):07}" if newest.isdigit() else newest)
    if not (folder / _INDEX_FILE).is_file():
        raise unusable(f"{tracker} names {newest}, but {folder} has no {_INDEX_FILE}; copy the checkpoint again")
    return folder


def _tracked(tracker: Path) -> str:
    """Return the iteration that a tracker names: a number, or `release`."""
    with open_regular(tracker) as opened:
        newest = opened.read(100).decode(errors="replace").strip()
    if not _TRACKER.fullmatch(newest):
        raise unusable(f"{tracker} names {newest!r}, neither an iteration nor release; copy the checkpoint again")
    return newest


class TorchDistReader:
    """The tensors of one checkpoint; reads its index when opened and afterwards only what is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _require_format(folder)
        self._tensors = _read_index(folder / _INDEX_FILE)
        self.sizes: Mapping[str, tuple[int, ...]] = {key: tensor.size for key, tensor in self._tensors.items()}
        self._by_index: dict[tuple[str, int], dict[tuple[int, ...], list[StoredPart]]] = {}

    def dtype(self, key: str) -> torch.dtype:
        """Return the type of a tensor's elements."""
        return DTYPES[self._tensors[key].dtype]

    def require_types(self, keys: Iterable[str]) -> None:
        """Refuse tensors of types that no model of ours has."""
        others = {f"{key} ({self._tensors[key].dtype})" for key in keys if self._tensors[key].dtype not in DTYPES}
        if others:
            raise unusable(f"{self.folder} holds {listed(others)}; save the weights as one of {', '.join(DTYPES)}")

    def read(self, place: IndexedKey) -> Tensor:
        """Return one tensor, without the axes by which it is stacked."""
        inside = self.sizes[place.key][len(place.index) :]
        region = tuple(slice(at, at + 1) for at in place.index) + tuple(slice(0, size) for size in inside)
        parts = [part for part in self._parts_near(place) if _overlap(part, region) is not None]
        try:
            self._require_whole(place.key, parts, region)
            target = torch.full([axis.stop - axis.start for axis in region], torch.nan, dtype=self.dtype(place.key))
            for part in parts:
                self._copy(part, self.dtype(place.key), region, target)
        except (OSError, RefusedTensor) as error:
            raise unusable(f"{self.folder}: {place.key} cannot be read ({error}); copy the checkpoint again") from error
        return target.reshape(inside)

    def _parts_near(self, place: IndexedKey) -> Sequence[StoredPart]:
        """Return the parts that may hold a place: one of 12,032 where 94 layers have 128 experts, each by itself."""
        axes = len(place.index)
        if (place.key, axes) not in self._by_index:
            by_index: dict[tuple[int, ...], list[StoredPart]] = {}
            for part in self._tensors[place.key].parts:
                is_single = all(size == 1 for size in part.sizes[:axes])
                by_index.setdefault(part.offsets[:axes] if is_single else (), []).append(part)
            self._by_index[place.key, axes] = by_index
        by_index = self._by_index[place.key, axes]
        return by_index.get(place.index, []) + (by_index.get((), []) if axes else [])

    def _require_whole(self, key: str, parts: Sequence[StoredPart], region: tuple[slice, ...]) -> None:
        """Refuse parts that leave a gap, or promise more than their files can hold, before memory is taken for them."""
        overlaps = [_overlap(part, region) for part in parts]
        elements = sum(prod(axis.stop - axis.start for axis in overlap) for overlap in overlaps if overlap is not None)
        starts = {part.offsets for part in parts}
        if len(starts) != len(parts) or elements != prod(axis.stop - axis.start for axis in region):
            raise RefusedTensor("parts of it are missing or there twice")
        for part in parts:
            held, needed = part.length, prod(part.sizes) * self.dtype(key).itemsize
            if needed > held:
                raise RefusedTensor(f"{part.file} has {held:,} bytes for a part that takes {needed:,}")
        on_disk = sum(self._file_bytes(file) for file in {part.file for part in parts})
        if sum(part.length for part in parts) > on_disk:
            raise RefusedTensor("its parts are longer than their files")

    def _file_bytes(self, file: str) -> int:
        with open_regular(self.folder / file) as opened:
            return os.fstat(opened.fileno()).st_size

    def _copy(self, part: StoredPart, dtype: torch.dtype, region: tuple[slice, ...], target: Tensor) -> None:
        with open_regular(self.folder / part.file) as opened:
            stored = read_stored_tensor(opened, part.start, part.length)
        if stored.dtype != dtype or tuple(stored.shape) != part.sizes:
            raise RefusedTensor(f"{part.file} holds {stored.dtype} {list(stored.shape)}, and the index says otherwise")
        overlap = _overlap(part, region)
        if overlap is None:
            return
        source = tuple(slice(axis.start - at, axis.stop - at) for axis, at in zip(overlap, part.offsets, strict=True))
        starts = (axis.start for axis in region)
        into = tuple(slice(axis.start - at, axis.stop - at) for axis, at in zip(overlap, starts, strict=True))
        target[into] = stored[source]


def _overlap(part: StoredPart, region: tuple[slice, ...]) -> tuple[slice, ...] | None:
    """Return the overlap of a part and a region of a tensor; None where they have none."""
    if len(part.offsets) != len(region):
        return None
    common = tuple(
        slice(max(axis.start, start), min(axis.stop, start + size))
        for axis, start, size in zip(region, part.offsets, part.sizes, strict=True)
    )
    return common if all(axis.start < axis.stop for axis in common) else None


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """A tensor to write, made only when it is written."""

    place: IndexedKey
    shape: tuple[int, ...]
    dtype: torch.dtype
    make: Callable[[], Tensor]


def write(folder: Path, tensors: Sequence[WrittenTensor], stacks: Stacks) -> None:
    """Write a checkpoint of these tensors, holding one of them at a time."""
    # One file: a second thread would hold a second tensor.
    save({}, storage_writer=FileSystemWriter(folder), planner=_OneByOne(tensors, stacks), no_dist=True)
    form = FORMAT | {"common_backend": "torch", "common_backend_version": 1}
    (folder / _FORMAT_FILE).write_text(json.dumps(form), encoding="utf-8")
    torch.save({"checkpoint_version": 3.0, "iteration": 0, "content_metadata": {}}, folder / "common.pt")


def extra_states(places: Iterable[IndexedKey], stacks: Stacks) -> list[str]:
    """Return the keys of modules' extra states: Megatron loads no checkpoint that lacks one of them."""
    modules = {(place.key.rpartition(".")[0], place.index) for place in places}
    attention = {(key.replace(".linear_proj", ".core_attention"), index) for key, index in modules}
    return [
        f"{key}._extra_state/shard_{_dotted(index or (0,))}_{_dotted(stacks.lengths(index) or (1,))}"
        for key, index in sorted(modules | attention)
    ]


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


class _OneByOne(SavePlanner):
    """Make each tensor when it is written."""

    def __init__(self, tensors: Sequence[WrittenTensor], stacks: Stacks) -> None:
        self.stacks = stacks
        self.tensors = {self._index(tensor): tensor for tensor in tensors}
        self.extra_states = extra_states((tensor.place for tensor in tensors), stacks)

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        """There is no state dict."""

    def create_local_plan(self) -> SavePlan:
        states = [WriteItem(described.MetadataIndex(key), WriteItemType.BYTE_IO) for key in self.extra_states]
        return SavePlan([self._item(index, tensor) for index, tensor in self.tensors.items()] + states)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], described.Metadata]:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Tensor | io.BytesIO:
        if write_item.type is WriteItemType.BYTE_IO:
            nothing = io.BytesIO()
            torch.save([None], nothing)
            return nothing
        tensor = self.tensors[write_item.index.fqn, tuple(write_item.index.offset or ())]
        return tensor.make().reshape(self._sizes(tensor)).contiguous()

    def _item(self, index: tuple[str, tuple[int, ...]], tensor: WrittenTensor) -> WriteItem:
        key, offsets = index
        chunk = described.ChunkStorageMetadata(torch.Size(offsets), torch.Size(self._sizes(tensor)))
        whole = torch.Size((*self.stacks.lengths(tensor.place.index), *tensor.shape))
        data = TensorWriteData(chunk, described.TensorProperties(dtype=tensor.dtype), whole)
        return WriteItem(described.MetadataIndex(key, torch.Size(offsets)), WriteItemType.SHARD, tensor_data=data)

    @staticmethod
    def _index(tensor: WrittenTensor) -> tuple[str, tuple[int, ...]]:
        return tensor.place.key, (*tensor.place.index, *(0 for _ in tensor.shape))

    @staticmethod
    def _sizes(tensor: WrittenTensor) -> tuple[int, ...]:
        return (*(1 for _ in tensor.place.index), *tensor.shape)


def _read_index(file: Path) -> dict[str, IndexedTensor]:
    try:
        with open_regular(file) as opened:
            size = os.fstat(opened.fileno()).st_size
            if size > checkpoint_index.MOST_BYTES:
                raise unusable(f"{file} has {size:,} bytes; an index has {checkpoint_index.MOST_BYTES:,} at most")
            command = [sys.executable, "-I", "-m", checkpoint_index.__name__, str(size)]
            # An empty environment: the process that reads a stranger's bytes knows none of the user's secrets.
            reply = subprocess.run(
                command, stdin=opened, capture_output=True, env={}, timeout=checkpoint_index.SECONDS, check=False
            )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise unusable(f"{file} cannot be read ({error}); copy the checkpoint again") from error
    if reply.returncode:
        raise unusable(f"{file} is no index of a checkpoint ({_reason(reply)}); copy the checkpoint again")
    return _TENSORS.validate_json(reply.stdout)


def _reason(reply: subprocess.CompletedProcess[bytes]) -> str:
    if reply.returncode == checkpoint_index.REFUSED:
        return reply.stderr.decode(errors="replace").strip()
    return f"reading it takes more memory or time than an index of its size does, exit code {reply.returncode}"


def _require_format(folder: Path) -> None:
    form = read_json_object(folder / _FORMAT_FILE)
    backend = form.get("sharded_backend")
    if backend != FORMAT["sharded_backend"]:
        raise unusable(f"{folder} is a checkpoint of {shown(backend)}; save it as torch_dist with Megatron")


def keys_of_model(reader: TorchDistReader) -> Iterator[str]:
    """Yield the keys of a model's tensors: those of an optimizer begin otherwise."""
    return (key for key in reader.sizes if key.startswith(("decoder.", "embedding.", "output_layer.")))
