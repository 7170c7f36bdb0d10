"""Weights as safetensors in a folder that trainer and engines share: a volume, or /dev/shm of one machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import zip_longest

from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from moejob_rollout.transfer.checkpoint import CheckpointTransfer
from moejob_rollout.transfer.checksums import tensor_checksums


@dataclass
class DiskInit(WeightTransferInitInfo):
    """Nothing is agreed beforehand: each update names its files."""


@dataclass
class DiskUpdate(WeightTransferUpdateInfo):
    """The files of one update, whole or in part."""

    paths: list[str]
    # Of each file, the checksums of its tensors' pages. Files of a writer without checksums are not looked at.
    checksums: list[dict[str, list[int]]] = field(default_factory=list)


class DiskTransfer(CheckpointTransfer[DiskInit, DiskUpdate]):
    """Reads files, one tensor at a time."""

    init_info_cls = DiskInit
    update_info_cls = DiskUpdate

    def receive_weights(self, update_info: DiskUpdate) -> None:
        """Load the tensors of all files."""
        self.load(self._read_tensors(update_info))

    def _read_tensors(self, update_info: DiskUpdate) -> Iterator[tuple[str, Tensor]]:
        # One tensor at a time: all tensors of a file together may be more than this worker has memory for.
        for path, checksums in zip_longest(update_info.paths, update_info.checksums, fillvalue=dict[str, list[int]]()):
            with safe_open(path, "pt") as file:
                names = list(file.keys())
                self.note_tensors(names)
                for name in names:
                    tensor = file.get_tensor(name)
                    if name in checksums and tensor_checksums(tensor) != checksums[name]:
                        self.note_changed([name])
                    yield name, tensor
