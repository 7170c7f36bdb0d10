"""Published tensors, one at a time, from a checkpoint, or from published weights and the adapters beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from moejob_trainer.checkpoints.shards import ShardSpec
from moejob_trainer.conversion.adapters import adapter_pair_names
from moejob_trainer.conversion.families import TensorTable
from moejob_trainer.conversion.loading import PublishedCheckpoint
from moejob_trainer.conversion.tensor_table import TensorPiece, slice_lengths
from moejob_trainer.megatron.stored_shards import ShardFiles, StoredShard, TensorRole, require_shape, shards_in
from moejob_trainer.runtime.read_ahead import ask


class PublishedTensors(Protocol):
    """The tensors of a model as its family publishes them."""

    @property
    def extra_bytes_per_element(self) -> int:
        """The bytes that an element takes while its tensor is made, in addition to the tensor that is returned."""

    def tensor(self, piece: TensorPiece, dtype: torch.dtype) -> Tensor:
        """Return one whole tensor in this type."""


@dataclass(frozen=True)
class CheckpointTensors:
    """The tensors of a checkpoint's weights, each read on request."""

    table: TensorTable
    shards_by_parameter: Mapping[str, Sequence[StoredShard]]
    files: ShardFiles
    # A buffer for some rows, however large the tensor is.
    extra_bytes_per_element: int = 0

    @classmethod
    def open(cls, folder: Path, table: TensorTable) -> CheckpointTensors:
        """Read the headers of a checkpoint; IncompatibleState where it holds a parameter in another shape."""
        shards_by_parameter: dict[str, list[StoredShard]] = {}
        for path in sorted(folder.glob("state-*.safetensors")):
            for stored_shard in shards_in(folder, path.name):
                if stored_shard.kind is TensorRole.WEIGHT and stored_shard.name in table.by_name:
                    shards_by_parameter.setdefault(stored_shard.name, []).append(stored_shard)
        for name, shards in shards_by_parameter.items():
            require_shape(table.by_name[name], shards, folder)
        return cls(table, shards_by_parameter, ShardFiles(folder))

    def has_piece(self, piece: TensorPiece) -> bool:
        """Return whether the checkpoint has the parameter of a tensor: one with adapters may lack it."""
        return piece.parameter in self.shards_by_parameter

    def tensor(self, piece: TensorPiece, dtype: torch.dtype) -> Tensor:
        """Return one tensor: stored in float32 if the optimizer updates it, in its own type if it was frozen."""
        published = torch.empty(piece.shape, dtype=dtype)
        for section in piece.sections:
            rows = published[section.first_row : section.first_row + section.shape[0]]
            self._fill_rows(rows, section)
        return published

    def _fill_rows(self, rows: Tensor, section: TensorPiece) -> None:
        shard = ShardSpec(tuple(part.start for part in section.region), slice_lengths(section.region))
        stored_shards = self.shards_by_parameter.get(section.parameter, ())
        for part in self.files.file_parts(shard, stored_shards):
            ask(part)
        self.files.fill_shard(
            section.view_as_ours(rows, section.region), shard, stored_shards, f"weight of {section.parameter}"
        )


@dataclass(frozen=True)
class MergedTensors:
    """Weights with the product of their adapters added: W + scale B A, summed in float32."""

    weights: CheckpointTensors
    adapters: CheckpointTensors
    scale: float
    # The published weights, if the checkpoint holds the trained parameters alone.
    base: PublishedCheckpoint | None
    # The weight, the product and their sum.
    extra_bytes_per_element: int = 3 * torch.float32.itemsize

    def tensor(self, piece: TensorPiece, dtype: torch.dtype) -> Tensor:
        """Return one tensor with its adapter merged."""
        weight = self._read_weight(piece)
        pair = [self.adapters.table.by_tensor.get(name) for name in adapter_pair_names(piece.tensor)]
        a, b = (
            None if adapter_piece is None else self.adapters.tensor(adapter_piece, torch.float32)
            for adapter_piece in pair
        )
        merged = weight if a is None or b is None else weight + self.scale * (b @ a)
        return merged.to(dtype)

    def _read_weight(self, piece: TensorPiece) -> Tensor:
        if self.base is None or self.weights.has_piece(piece):
            return self.weights.tensor(piece, torch.float32)
        full_region = tuple(slice(0, size) for size in piece.shape)
        return self.base.checkpoint.read(piece.tensor, full_region).float()
