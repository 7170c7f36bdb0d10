"""Both directions between Megatron's checkpoints and Hugging Face's folders, each tensor read back and compared."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial, reduce
from pathlib import Path

import torch
from torch import Tensor

from moejob_api.models.families import shape_of
from moejob_api.models.shape import Experts
from moejob_trainer.conversion.checkpoint import StoredTensor, TensorSource, join_names, unusable_checkpoint
from moejob_trainer.conversion.families import TensorTable, build_tensor_table
from moejob_trainer.conversion.groups import ModelGroups
from moejob_trainer.conversion.loading import PublishedCheckpoint, open_published_checkpoint
from moejob_trainer.conversion.model_export import ExportReport, ExportTarget, export_weights, remove_on_failure
from moejob_trainer.conversion.safetensors_writer import CorruptExport
from moejob_trainer.conversion.templates import CONFIG_FILE, copy_config_and_tokenizer
from moejob_trainer.interchange.foreign_files import read_json_object, require_links_inside
from moejob_trainer.interchange.megatron_bridge import BridgedModel, read_bridged_model
from moejob_trainer.interchange.naming import MegatronTensor, megatron_tensors
from moejob_trainer.interchange.run_config import write_run_config
from moejob_trainer.interchange.torch_dist import (
    IndexedKey,
    PlannedTensor,
    StackSizes,
    TorchDistReader,
    find_iteration_folder,
    locate_tensor,
    model_keys,
    write_checkpoint,
)
from moejob_trainer.model.parameters import Slices
from moejob_trainer.runtime.disk import Disk, publish_folder
from moejob_trainer.runtime.heartbeats import ShareReport, ignore_share

_DTYPES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_ITERATION = "iter_0000000"


@dataclass(frozen=True)
class MegatronWeights:
    """A checkpoint of Megatron's, seen under Hugging Face's names."""

    reader: TorchDistReader
    table: TensorTable
    entries: Mapping[str, tuple[IndexedKey, MegatronTensor]]

    @classmethod
    def open(cls, folder: Path, table: TensorTable, tensors: list[MegatronTensor]) -> MegatronWeights:
        """Find every tensor of a model; InvalidSpec for a missing tensor, or for one that the model lacks."""
        reader = TorchDistReader(folder)
        stacks = [replace(_stack_sizes(table), are_layers_stacked=stacked) for stacked in (True, False)]
        entries: dict[str, tuple[IndexedKey, MegatronTensor]] = {}
        for tensor in tensors:
            candidates = [locate_tensor(name, stacking) for name in tensor.names for stacking in stacks]
            indexed_key = next((candidate for candidate in candidates if candidate.key in reader.sizes), None)
            if indexed_key is not None:
                entries |= dict.fromkeys(tensor.published_names, (indexed_key, tensor))
        weights = cls(reader, table, entries)
        weights._refuse_misfits()
        return weights

    def _refuse_misfits(self) -> None:
        folder, config = self.reader.folder, "use the config.json of the model that it was made of"
        missing = self.table.by_tensor.keys() - self.entries.keys()
        if missing:
            raise unusable_checkpoint(
                f"{folder} lacks {len(missing)} tensors of this model: {join_names(missing)}; {config}"
            )
        unexpected = {*model_keys(self.reader)} - {indexed_key.key for indexed_key, _ in self.entries.values()}
        if unexpected:
            raise unusable_checkpoint(
                f"{folder} holds {len(unexpected)} tensors that this model lacks: {join_names(unexpected)}; {config}"
            )
        stacks = (self.table.shape.layers, _stack_sizes(self.table).experts)
        mismatched = {
            entry.key for entry, _ in self.entries.values() if not self._is_stacked_as(entry, len(stacks[0]), stacks[1])
        }
        if mismatched:
            raise unusable_checkpoint(
                f"{folder} has another number of layers or experts in {join_names(mismatched)}; {config}"
            )
        self.reader.require_types({entry.key for entry, _ in self.entries.values()})

    def _is_stacked_as(self, indexed_key: IndexedKey, layers: int, experts: int) -> bool:
        stacked_sizes = self.reader.sizes[indexed_key.key][: len(indexed_key.index)]
        return stacked_sizes in ((), (layers,), (experts,), (layers, experts))

    @property
    def folder(self) -> Path:
        """The folder of Megatron's checkpoint."""
        return self.reader.folder

    @cached_property
    def tensors(self) -> Mapping[str, StoredTensor]:
        """Shape and type of each tensor."""
        return {
            name: StoredTensor(self.folder, piece.shape, _DTYPES[self.reader.tensor_dtype(self.entries[name][0].key)])
            for name, piece in self.table.by_tensor.items()
        }

    def read(self, name: str, part: Slices) -> Tensor:
        """One part of a tensor, cut out of the Megatron tensor that holds it."""
        indexed_key, tensor = self.entries[name]
        parts = tensor.split(self.reader.read_tensor(indexed_key))
        full_tensor = parts[tensor.published_names.index(name)]
        shape = self.table.by_tensor[name].shape
        # Megatron may have padded the vocabulary.
        full_tensor = full_tensor[: shape[0]] if full_tensor.shape[1:] == shape[1:] else full_tensor
        if tuple(full_tensor.shape) != shape:
            raise unusable_checkpoint(
                f"{self.folder}: {name} is {list(full_tensor.shape)}, not {list(shape)} as config.json says; use the "
                "config.json of the model that it was made of"
            )
        return full_tensor[part]

    def common_dtype(self) -> torch.dtype:
        """Return the type that holds every weight without a loss."""
        weights = (
            indexed_key.key
            for indexed_key, tensor in self.entries.values()
            if not tensor.names[0].endswith("expert_bias")
        )
        return reduce(torch.promote_types, {self.reader.tensor_dtype(key) for key in weights})


class _LazyParameters(Mapping[str, Tensor]):
    """Our parameters, each read when it is asked for."""

    def __init__(self, source: PublishedCheckpoint) -> None:
        self.source = source

    def __getitem__(self, name: str) -> Tensor:
        parameter = self.source.table.by_name[name]
        return self.source.read_parameter(parameter, tuple(slice(0, size) for size in parameter.shape))

    def __iter__(self) -> Iterator[str]:
        return iter(self.source.table.by_name)

    def __len__(self) -> int:
        return len(self.source.table.parameters)


def import_megatron_checkpoint(
    checkpoint: Path, template: Path, folder: Path, report_share: ShareReport = ignore_share
) -> ExportReport:
    """Write a Megatron checkpoint as a Hugging Face folder; `template` has the config.json and the tokenizer."""
    _refuse_existing(folder)
    for foreign_folder in (checkpoint, template):
        require_links_inside(foreign_folder)
    tensor_table, tensors, _ = _read_model(template)
    weights = MegatronWeights.open(find_iteration_folder(checkpoint), tensor_table, tensors)
    target = ExportTarget(folder, template, weights.common_dtype(), report_share=report_share)
    with remove_on_failure(target.unfinished_folder):
        return export_weights(
            _LazyParameters(PublishedCheckpoint(weights, tensor_table, ())), tensor_table, ModelGroups(), target
        )


def require_convertible_model(template: Path) -> None:
    """Raise InvalidSpec where a model of this config.json cannot be written for Megatron."""
    _read_model(template)


def export_megatron_checkpoint(source: Path, folder: Path, *, replaces_older: bool = False) -> int:
    """Write a Hugging Face folder as a Megatron checkpoint; return the number of its tensors.

    Config and tokenizer lie beside the weights, so that `spec.model.source` can name the checkpoint by itself.
    """
    if not replaces_older:
        _refuse_existing(folder)
    tensor_table, tensors, model = _read_model(source)
    published_tensors = open_published_checkpoint(source, tensor_table).checkpoint
    unfinished = folder.with_name(f".{folder.name}.unfinished")
    with remove_on_failure(unfinished):
        shutil.rmtree(unfinished, ignore_errors=True)
        iteration = unfinished / _ITERATION
        iteration.mkdir(parents=True)
        stacks = _stack_sizes(tensor_table)
        write_checkpoint(
            iteration, [_plan_tensor(tensor, published_tensors, tensor_table, stacks) for tensor in tensors], stacks
        )
        write_run_config(iteration, model.provider, folder.absolute())
        copy_config_and_tokenizer(source, unfinished, tensor_table.shape, _common_dtype(published_tensors))
        Disk().write(unfinished / "latest_checkpointed_iteration.txt", b"0")
        _compare_tensors(MegatronWeights.open(iteration, tensor_table, tensors), published_tensors)
        # Its tensors are compared above, in gigabytes.
        publish_folder(Disk(), unfinished, folder, lambda path: path.suffix != ".distcp")
    return len(tensors)


def _read_model(folder: Path) -> tuple[TensorTable, list[MegatronTensor], BridgedModel]:
    config = read_json_object(folder / CONFIG_FILE)
    # MTP modules stay behind: Megatron-Bridge does not convert those of every family.
    tensor_table = build_tensor_table(replace(shape_of(config), mtp_layers=()))
    model = read_bridged_model(folder)
    return tensor_table, megatron_tensors(model, tensor_table), model


def _stack_sizes(tensor_table: TensorTable) -> StackSizes:
    """Layers that are alike are stacked, as Megatron does where every layer has experts or none has."""
    layers = tensor_table.shape.layers
    experts = {layer.mlp.count if isinstance(layer.mlp, Experts) else 0 for layer in layers}
    return StackSizes(len(layers), max(experts), are_layers_stacked=len(experts) == 1)


def _plan_tensor(
    tensor: MegatronTensor, published_tensors: TensorSource, tensor_table: TensorTable, stacks: StackSizes
) -> PlannedTensor:
    # Shapes alone: no tensor is read before it is written.
    parts = [torch.empty(tensor_table.by_tensor[name].shape, device="meta") for name in tensor.published_names]
    shape = tuple(tensor.join(parts).shape)
    stored_dtypes = {published_tensors.tensors[name].dtype for name in tensor.published_names}
    dtype = reduce(torch.promote_types, (dtype for dtype, name in _DTYPES.items() if name in stored_dtypes))
    return PlannedTensor(
        locate_tensor(tensor.names[0], stacks), shape, dtype, partial(_join_published, tensor, published_tensors)
    )


def _join_published(tensor: MegatronTensor, published_tensors: TensorSource) -> Tensor:
    return tensor.join([_read_whole_tensor(published_tensors, name) for name in tensor.published_names])


def _read_whole_tensor(weights: TensorSource, name: str) -> Tensor:
    return weights.read(name, tuple(slice(0, size) for size in weights.tensors[name].shape))


def _compare_tensors(megatron_weights: MegatronWeights, published_tensors: TensorSource) -> None:
    for name in megatron_weights.table.by_tensor:
        if not torch.equal(_read_whole_tensor(megatron_weights, name), _read_whole_tensor(published_tensors, name)):
            raise CorruptExport(f"{megatron_weights.folder}: {name} was read back with other values than were written")


def _common_dtype(published_tensors: TensorSource) -> torch.dtype:
    """Return the type that most of the weights are stored in: buffers stay in float32."""
    counts = Counter(tensor.dtype for tensor in published_tensors.tensors.values())
    return next(dtype for dtype, name in _DTYPES.items() if name == counts.most_common(1)[0][0])


def _refuse_existing(folder: Path) -> None:
    if folder.exists():
        raise unusable_checkpoint(f"{folder} exists; name another folder, or remove it")
