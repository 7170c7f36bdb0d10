"""Megatron's torch_dist checkpoints, read and written tensor by tensor.

One parameter of all layers is one entry, stacked along a first axis, and so are the experts of a layer. Layers that
differ have entries of their own. Qwen3-MoE's `decoder.layers.mlp.experts.experts.linear_fc2.weight` is
[layers, experts, hidden, width], DeepSeek's `decoder.layers.3.mlp.experts.experts.linear_fc2.weight` [experts, ...].
"""

from __future__ import annotations

import io
import json
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import metadata as described
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_saver import save

from moejob_trainer.conversion.checkpoint import unusable

FORMAT = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
_FORMAT_FILE, _INDEX_FILE = "metadata.json", ".metadata"
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.(linear_fc[12])\.(weight|bias)(\d+)")
# No code of a checkpoint runs: its index, a pickle, may name nothing else.
_INDEX_CLASSES = {
    ("torch.distributed.checkpoint.metadata", name)
    for name in (
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    )
} | {
    ("collections", "OrderedDict"),
    ("pathlib", "PosixPath"),
    ("torch", "Size"),
    ("torch.distributed.checkpoint.filesystem", "_StorageInfo"),
    ("torch.distributed.checkpoint.filesystem", "_StoragePrefix"),
    ("torch.distributed.checkpoint.planner", "BytesIOWriteData"),
    ("torch.distributed.checkpoint.planner", "SavePlan"),
    ("torch.distributed.checkpoint.planner", "TensorWriteData"),
    ("torch.distributed.checkpoint.planner", "WriteItem"),
    ("torch.distributed.checkpoint.planner", "WriteItemType"),
    ("torch.serialization", "_get_layout"),
}


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
    newest = tracker.read_text(encoding="utf-8").strip()
    folder = path / (f"iter_{int(newest):07}" if newest.isdigit() else newest)
    if not (folder / _INDEX_FILE).is_file():
        raise unusable(f"{tracker} names {newest}, but {folder} has no {_INDEX_FILE}; copy the checkpoint again")
    return folder


class TorchDistReader:
    """The tensors of one checkpoint; reads its index when opened and afterwards only what is asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        _expect_format(folder)
        index = _index(folder / _INDEX_FILE)
        self._described = {
            key: one
            for key, one in index.state_dict_metadata.items()
            if isinstance(one, described.TensorStorageMetadata)
        }
        self.sizes: Mapping[str, tuple[int, ...]] = {key: tuple(one.size) for key, one in self._described.items()}
        self._storage = FileSystemReader(folder)
        self._storage.set_up_storage_reader(index, is_coordinator=True)

    def dtype(self, key: str) -> torch.dtype:
        """Return the type of a tensor's elements."""
        return self._described[key].properties.dtype

    def read(self, found: IndexedKey) -> Tensor:
        """Return one tensor, without the axes by which it is stacked."""
        inside = self.sizes[found.key][len(found.index) :]
        offsets = (*found.index, *(0 for _ in inside))
        sizes = (*(1 for _ in found.index), *inside)
        target = torch.full(sizes, torch.nan).to(self.dtype(found.key))
        part = described.ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes))
        items = create_read_items_for_chunk_list(found.key, self._described[found.key], [part])
        if sum(item.lengths.numel() for item in items) != target.numel():
            raise unusable(f"{self.folder} lacks parts of {found.key}; copy the checkpoint again")
        try:
            self._storage.read_data(LoadPlan(items), _Into(target)).wait()
        except (OSError, RuntimeError, pickle.UnpicklingError, EOFError) as error:
            raise unusable(f"{self.folder}: {found.key} cannot be read ({error}); copy the checkpoint again") from error
        return target.reshape(inside)


class _Into(LoadPlanner):
    """A reader that fills one tensor."""

    def __init__(self, target: Tensor) -> None:
        self.target = target

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        part = self.target
        for axis, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            part = part.narrow(axis, offset, length)
        return part

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        """Nothing is left to do: it was read into place."""

    def set_up_planner(self, *_: Any, **__: Any) -> None:
        raise NotImplementedError

    def create_local_plan(self) -> LoadPlan:
        raise NotImplementedError

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        raise NotImplementedError

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        raise NotImplementedError

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class WrittenTensor:
    """A tensor to write, made when its turn comes."""

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
    """Return the keys of what modules save beside weights: Megatron loads no checkpoint that lacks one it asks for."""
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


class _IndexUnpickler(pickle.Unpickler):
    """Refuse any name that no index of a checkpoint has."""

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype | torch.layout)
        if is_dtype or (module, name) in _INDEX_CLASSES:
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _index(file: Path) -> described.Metadata:
    try:
        with file.open("rb") as opened:
            found: described.Metadata = _IndexUnpickler(opened).load()
    except (pickle.UnpicklingError, EOFError, AttributeError, ValueError) as error:
        raise unusable(f"{file} is no index of a checkpoint ({error}); copy the checkpoint again") from error
    astray = [
        one.relative_path for one in found.storage_data.values() if Path(one.relative_path).name != one.relative_path
    ]
    if astray:
        raise unusable(f"{file} names {astray[0]}, which is outside of its folder; do not use this checkpoint")
    return found


def _expect_format(folder: Path) -> None:
    try:
        form = json.loads((folder / _FORMAT_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise unusable(f"{folder / _FORMAT_FILE} cannot be read: {error}; copy the checkpoint again") from error
    if form.get("sharded_backend") != FORMAT["sharded_backend"]:
        raise unusable(f"{folder} is a {form.get('sharded_backend')} checkpoint; save it as torch_dist with Megatron")


def keys_of_model(reader: TorchDistReader) -> Iterator[str]:
    """Yield the keys of a model's tensors: those of an optimizer begin otherwise."""
    return (key for key in reader.sizes if key.startswith(("decoder.", "embedding.", "output_layer.")))
