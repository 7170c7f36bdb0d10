"""Weights as safetensors in a folder that trainer and engines share: a volume, or /dev/shm of one machine."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from safetensors import safe_open
from torch import Tensor
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from moejob_rollout.transfer.checkpoint import CheckpointTransfer


@dataclass
class DiskInit(WeightTransferInitInfo):
    """Nothing is agreed beforehand."""


@dataclass
class DiskUpdate(WeightTransferUpdateInfo):
    """The files of one update, whole or in part."""

    paths: list[str]


class DiskTransfer(CheckpointTransfer[DiskInit, DiskUpdate]):
    """Reads files, one tensor at a time."""

    init_info_cls = DiskInit
    update_info_cls = DiskUpdate

    def receive_weights(self, update_info: DiskUpdate) -> None:
        """Load the tensors of all files."""
        self.load(self._tensors(update_info.paths))

    def _tensors(self, paths: list[str]) -> Iterator[tuple[str, Tensor]]:
        # One tensor at a time: all tensors of a file together may be more than this worker has memory for.
        for path in paths:
            with safe_open(path, "pt") as file:
                names = list(file.keys())
                self.note_tensors(names)
                for name in names:
                    yield name, file.get_tensor(name)
