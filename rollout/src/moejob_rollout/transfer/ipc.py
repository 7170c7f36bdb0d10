"""Weights in memory of a GPU that a trainer's rank and a worker share, opened by the handles of CUDA IPC.

vLLM's own transport of this kind unpickles what it is sent over HTTP; this one reads JSON.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from moejob_rollout.transfer.buckets import changed_tensors, unpack_bucket
from moejob_rollout.transfer.checkpoint import CheckpointTransfer


@dataclass
class IpcInit(WeightTransferInitInfo):
    """Nothing is agreed beforehand: each bucket comes with its handles."""


@dataclass
class IpcUpdate(WeightTransferUpdateInfo):
    """The tensors of one bucket in their order, and the bucket's handle on each GPU, by the GPU's UUID."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    handles: dict[str, dict[str, Any]]
    part_bytes: list[int]
    checksums: list[list[int]]


class IpcTransfer(CheckpointTransfer[IpcInit, IpcUpdate]):
    """Opens buckets, and copies from them before it answers: the trainer uses the memory again."""

    init_info_cls = IpcInit
    update_info_cls = IpcUpdate

    def receive_weights(self, update_info: IpcUpdate) -> None:
        """Load the tensors of one bucket."""
        uuid = str(torch.cuda.get_device_properties(self.device).uuid)
        if uuid not in update_info.handles:
            raise ValueError(f"the worker is on GPU {uuid}, and the trainer's ranks on {sorted(update_info.handles)}")
        self.note_tensors(update_info.names)
        bucket = open_bucket(update_info.handles[uuid], self.device)
        self.note_changed(changed_tensors(bucket, update_info))
        tensors = unpack_bucket(bucket, update_info, self.stacks)
        torch.cuda.current_stream(self.device).synchronize()
        # Closed once for each time that the trainer has handed it out: it counts.
        del bucket
        self.load_bucket(tensors)


def open_bucket(handle: dict[str, Any], device: torch.device) -> Tensor:
    """Return the trainer's flat tensor of bytes."""
    elements = handle["storage_bytes"]
    bucket: Tensor = rebuild_cuda_tensor(
        Tensor,
        torch.Size([elements]),
        (1,),
        handle["tensor_offset"],
        torch.TypedStorage,
        torch.uint8,
        device.index,
        base64.b64decode(handle["storage"]),
        handle["storage_bytes"],
        handle["storage_offset"],
        False,
        base64.b64decode(handle["counter"]),
        handle["counter_offset"],
        base64.b64decode(handle["event"]),
        handle["waits_for_event"],
    )
    return bucket
