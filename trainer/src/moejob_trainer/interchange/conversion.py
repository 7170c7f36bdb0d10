"""Both directions between Megatron's checkpoints and Hugging Face's folders, each tensor read back and compared."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from pathlib import Path

import torch
from torch import Tensor

from moejob_api.models.families import shape_of
from moejob_api.models.shape import Experts
from moejob_trainer.conversion.checkpoint import StoredTensor, listed, unusable
from moejob_trainer.conversion.families import Table, table
from moejob_trainer.conversion.groups import ModelGroups
from moejob_trainer.conversion.loading import Source, opened
from moejob_trainer.conversion.model_export import ExportReport, Target, export, removed_on_failure
from moejob_trainer.conversion.quantized import TensorSource
from moejob_trainer.conversion.safetensors_writer import CorruptExport
from moejob_trainer.conversion.templates import CONFIG_FILE
from moejob_trainer.interchange.foreign_files import read_json_object, require_links_inside
from moejob_trainer.interchange.megatron_bridge import BridgedModel, bridged_model
from moejob_trainer.interchange.naming import MegatronTensor, megatron_tensors
from moejob_trainer.interchange.run_config import write_run_config
from moejob_trainer.interchange.torch_dist import (
    IndexedKey,
    Stacks,
    TorchDistReader,
    WrittenTensor,
    entry,
    iteration_folder,
    keys_of_model,
    write,
)
from moejob_trainer.model.parameters import Slices
from moejob_trainer.runtime.disk import Disk, publish_folder

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_ITERATION = "iter_0000000"


@dataclass(frozen=True)
class MegatronWeights:
    """A checkpoint of Megatron's, seen under Hugging Face's names."""

    reader: TorchDistReader
    table: Table
    entries: Mapping[str, tuple[IndexedKey, MegatronTensor]]

    @classmethod
    def open(cls, folder: Path, table: Table, tensors: list[MegatronTensor]) -> MegatronWeights:
        """Find every tensor of a model; InvalidSpec for a missing tensor, or for one that the model lacks."""
        reader = TorchDistReader(folder)
        stacks = [replace(_stacks(table), are_layers_stacked=stacked) for stacked in (True, False)]
        entries: dict[str, tuple[IndexedKey, MegatronTensor]] = {}
        for tensor in tensors:
            places = [entry(name, how) for name in tensor.names for how in stacks]
            found = next((place for place in places if place.key in reader.sizes), None)
            if found is not None:
                entries |= dict.fromkeys(tensor.published, (found, tensor))
        weights = cls(reader, table, entries)
        weights._refuse_misfits()
        return weights

    def _refuse_misfits(self) -> None:
        folder, config = self.reader.folder, "use the config.json of the model that it was made of"
        missing = self.table.by_tensor.keys() - self.entries.keys()
        if missing:
            raise unusable(f"{folder} lacks {len(missing)} tensors of this model: {listed(missing)}; {config}")
        extra = {*keys_of_model(self.reader)} - {found.key for found, _ in self.entries.values()}
        if extra:
            raise unusable(f"{folder} holds {len(extra)} tensors that this model lacks: {listed(extra)}; {config}")
        stacks = (self.table.shape.layers, _stacks(self.table).experts)
        wrong = {
            found.key for found, _ in self.entries.values() if not self._is_stacked_as(found, len(stacks[0]), stacks[1])
        }
        if wrong:
            raise unusable(f"{folder} has another number of layers or experts in {listed(wrong)}; {config}")
        self.reader.require_types({found.key for found, _ in self.entries.values()})

    def _is_stacked_as(self, found: IndexedKey, layers: int, experts: int) -> bool:
        held = self.reader.sizes[found.key][: len(found.index)]
        return held in ((), (layers,), (experts,), (layers, experts))

    @property
    def folder(self) -> Path:
        """The folder of the checkpoint."""
        return self.reader.folder

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Shape and type of each tensor."""
        return {
            name: StoredTensor(self.folder, piece.shape, _DTYPES[self.reader.dtype(self.entries[name][0].key)])
            for name, piece in self.table.by_tensor.items()
        }

    def read(self, name: str, part: Slices) -> Tensor:
        """One part of a tensor."""
        found, tensor = self.entries[name]
        parts = tensor.split(self.reader.read(found))
        whole = parts[tensor.published.index(name)]
        shape = self.table.by_tensor[name].shape
        # Megatron may have padded the vocabulary.
        whole = whole[: shape[0]] if whole.shape[1:] == shape[1:] else whole
        if tuple(whole.shape) != shape:
            raise unusable(
                f"{self.folder}: {name} is {list(whole.shape)}, not {list(shape)} as config.json says; use the "
                "config.json of the model that it was made of"
            )
        return whole[part]

    def dtype(self) -> torch.dtype:
        """Return the type that holds every weight without a loss."""
        weights = (found.key for found, tensor in self.entries.values() if not tensor.names[0].endswith("expert_bias"))
        return reduce(torch.promote_types, {self.reader.dtype(key) for key in weights})


class _Parameters(Mapping[str, Tensor]):
    """Our parameters, each read when it is asked for."""

    def __init__(self, source: Source) -> None:
        self.source = source

    def __getitem__(self, name: str) -> Tensor:
        parameter = self.source.table.by_name[name]
        return self.source.read(parameter, tuple(slice(0, size) for size in parameter.shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self.source.table.by_name)

    def __len__(self) -> int:
        return len(self.source.table.parameters)


def import_megatron(checkpoint: Path, template: Path, folder: Path) -> ExportReport:
    """Write a Megatron checkpoint as a Hugging Face folder; `template` has the config.json and the tokenizer."""
    _refuse_existing(folder)
    for given in (checkpoint, template):
        require_links_inside(given)
    declared, tensors, _ = _model(template)
    weights = MegatronWeights.open(iteration_folder(checkpoint), declared, tensors)
    target = Target(folder, template, weights.dtype())
    with removed_on_failure(target.unfinished):
        return export(_Parameters(Source(weights, declared, ())), declared, ModelGroups(), target)


def export_megatron(source: Path, folder: Path) -> int:
    """Write a Hugging Face folder as a Megatron checkpoint; return the number of its tensors."""
    _refuse_existing(folder)
    declared, tensors, model = _model(source)
    published = opened(source, declared).checkpoint
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    with removed_on_failure(unfinished):
        shutil.rmtree(unfinished, ignore_errors=True)
        iteration = unfinished / _ITERATION
        iteration.mkdir(parents=True)
        stacks = _stacks(declared)
        write(iteration, [_written(tensor, published, declared, stacks) for tensor in tensors], stacks)
        write_run_config(iteration, model.provider, source)
        Disk().write(unfinished / "latest_checkpointed_iteration.txt", b"0")
        _compare(MegatronWeights.open(iteration, declared, tensors), published)
        # Its tensors are compared above, in gigabytes.
        publish_folder(Disk(), unfinished, folder, lambda path: path.suffix != ".distcp")
    return len(tensors)


def _model(folder: Path) -> tuple[Table, list[MegatronTensor], BridgedModel]:
    config = read_json_object(folder / CONFIG_FILE)
    # MTP modules stay behind: Megatron-Bridge does not convert those of every family.
    declared = table(replace(shape_of(config), mtp_layers=()))
    model = bridged_model(folder)
    return declared, megatron_tensors(model, declared), model


def _stacks(declared: Table) -> Stacks:
    """Layers that are alike are stacked, as Megatron does where every layer has experts or none has."""
    layers = declared.shape.layers
    experts = {layer.mlp.count if isinstance(layer.mlp, Experts) else 0 for layer in layers}
    return Stacks(len(layers), max(experts), are_layers_stacked=len(experts) == 1)


def _written(tensor: MegatronTensor, published: TensorSource, declared: Table, stacks: Stacks) -> WrittenTensor:
    shapes = [declared.by_tensor[name].shape for name in tensor.published]
    shape = (sum(one[0] for one in shapes), *shapes[0][1:])
    stored = {published.tensors[name].dtype for name in tensor.published}
    dtype = reduce(torch.promote_types, (one for one, name in _DTYPES.items() if name in stored))
    return WrittenTensor(entry(tensor.names[0], stacks), shape, dtype, partial(_joined, tensor, published))


def _joined(tensor: MegatronTensor, published: TensorSource) -> Tensor:
    return tensor.join([_whole(published, name) for name in tensor.published])


def _whole(weights: TensorSource, name: str) -> Tensor:
    return weights.read(name, tuple(slice(0, size) for size in weights.tensors[name].shape))


def _compare(written: MegatronWeights, published: TensorSource) -> None:
    for name in written.table.by_tensor:
        if not torch.equal(_whole(written, name), _whole(published, name)):
            raise CorruptExport(f"{written.folder}: {name} was read back with other values than were written")


def _refuse_existing(folder: Path) -> None:
    if folder.exists():
        raise unusable(f"{folder} exists; name another folder, or remove it")
