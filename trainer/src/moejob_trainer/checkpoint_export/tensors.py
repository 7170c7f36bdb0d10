"""Published tensors, one at a time, from a checkpoint, or from published weights and the adapters beside them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from moejob_trainer.checkpoints.shards import ShardSpec
from moejob_trainer.conversion.adapters import names_of_pair
from moejob_trainer.conversion.families import Table
from moejob_trainer.conversion.loading import Source
from moejob_trainer.conversion.tensor_table import Piece, sizes
from moejob_trainer.megatron.stored_shards import ShardFiles, StoredShard, TensorRole, require_shape, shards_in
from moejob_trainer.runtime.read_ahead import ask


class PublishedTensors(Protocol):
    """The tensors of a model as its family publishes them."""

    @property
    def bytes_beside(self) -> int:
        """The bytes that an element takes while its tensor is made, in addition to the tensor that is returned."""

    def tensor(self, piece: Piece, dtype: torch.dtype) -> Tensor:
        """Return one whole tensor in this type."""


@dataclass(frozen=True)
class CheckpointTensors:
    """The tensors of a checkpoint's weights, each read on request."""

    table: Table
    stored: Mapping[str, Sequence[StoredShard]]
    files: ShardFiles
    # A buffer for some rows, however large the tensor is.
    bytes_beside: int = 0

    @classmethod
    def open(cls, folder: Path, table: Table) -> CheckpointTensors:
        """Read the headers of a checkpoint; OtherState where it holds a parameter in another shape."""
        stored: dict[str, list[StoredShard]] = {}
        for path in sorted(folder.glob("state-*.safetensors")):
            for one in shards_in(folder, path.name):
                if one.kind is TensorRole.WEIGHT and one.name in table.by_name:
                    stored.setdefault(one.name, []).append(one)
        for name, shards in stored.items():
            require_shape(table.by_name[name], shards, folder)
        return cls(table, stored, ShardFiles(folder))

    def holds(self, piece: Piece) -> bool:
        """Return whether the checkpoint has the parameter of a tensor: one with adapters may lack it."""
        return piece.parameter in self.stored

    def tensor(self, piece: Piece, dtype: torch.dtype) -> Tensor:
        """Return one tensor: stored in float32 if the optimizer updates it, in its own type if it was frozen."""
        shard = ShardSpec(tuple(part.start for part in piece.region), sizes(piece.region))
        stored = self.stored.get(piece.parameter, ())
        for part in self.files.parts(shard, stored):
            ask(part)
        theirs = torch.empty(piece.shape, dtype=dtype)
        self.files.fill(piece.ours(theirs, piece.region), shard, stored, f"weight of {piece.parameter}")
        return theirs


@dataclass(frozen=True)
class MergedTensors:
    """Weights with the product of their adapters added: W + scale B A, summed in float32."""

    weights: CheckpointTensors
    adapters: CheckpointTensors
    scale: float
    # The published weights, if the checkpoint holds the trained parameters alone.
    base: Source | None
    # The weight, the product and their sum.
    bytes_beside: int = 3 * torch.float32.itemsize

    def tensor(self, piece: Piece, dtype: torch.dtype) -> Tensor:
        """Return one tensor with its adapter merged."""
        weight = self._weight(piece)
        pair = [self.adapters.table.by_tensor.get(name) for name in names_of_pair(piece.tensor)]
        a, b = (None if one is None else self.adapters.tensor(one, torch.float32) for one in pair)
        merged = weight if a is None or b is None else weight + self.scale * (b @ a)
        return merged.to(dtype)

    def _weight(self, piece: Piece) -> Tensor:
        if self.base is None or self.weights.holds(piece):
            return self.weights.tensor(piece, torch.float32)
        whole = tuple(slice(0, size) for size in piece.shape)
        return self.base.checkpoint.read(piece.tensor, whole).float()
