"""Weights through the memory of the GPUs that ranks and colocated engines share: nothing is copied between devices.

Every rank puts a bucket on its own GPU and hands out CUDA's name for that memory; each worker of an engine opens the
one of its GPU. Names travel as JSON, so an engine unpickles nothing.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable
from typing import Any

import torch
from pydantic import TypeAdapter
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from moejob_trainer.distributed import messages
from moejob_trainer.rollouts.fleet import RolloutEngine
from moejob_trainer.rollouts.publisher import TransferResult
from moejob_trainer.rollouts.sync import WeightSync
from moejob_trainer.rollouts.transports.buckets import (
    BUCKET_ELEMENTS,
    Bucket,
    BucketRanks,
    all_gather_bucket,
    pack_buckets,
)
from moejob_trainer.rollouts.wire import WeightsLabel

# The name of a GPU, and what another process needs to open a tensor there.
IpcHandle = dict[str, str | int | bool]
_NAMED_HANDLE: TypeAdapter[tuple[str, IpcHandle]] = TypeAdapter(tuple[str, IpcHandle])
ExportHandle = Callable[[Tensor], tuple[str, IpcHandle]]


class IpcTransport:
    """Lends bucket by bucket. No rank keeps whole weights, so engines that were away wait for the next publication."""

    def __init__(
        self,
        ranks: BucketRanks,
        export_handle: ExportHandle,
        start_seconds: float,
        most_elements: int = BUCKET_ELEMENTS,
    ) -> None:
        self._ranks, self._export_handle, self._start_seconds = ranks, export_handle, start_seconds
        self._most_elements = most_elements

    @property
    def stacked_elements(self) -> int:
        """Return the elements of a bucket, as for a broadcast."""
        return self._most_elements

    def send(
        self,
        label: WeightsLabel,  # noqa: ARG002 of the protocol
        weights: Iterable[tuple[str, Tensor]],
        sync: WeightSync | None,
    ) -> TransferResult:
        """Lend all engines bucket by bucket, the next when all have read the last. Collective."""
        engines = () if sync is None else sync.run(sync.start_update(self._start_seconds))
        size_bytes = 0
        for part in pack_buckets(weights, self._most_elements, self._ranks.device):
            bucket = all_gather_bucket(part, self._ranks)
            if not bucket.entries:
                continue
            size_bytes += bucket.data.nbytes
            handles = messages.gather_values(self._export_handle(bucket.data), _NAMED_HANDLE, self._ranks.control)
            if sync is not None and handles is not None:
                engines = sync.run(_lend_bucket(sync, engines, bucket, dict(handles)))
            # Until engines have read it, the memory must not be used for anything else.
            messages.wait_for_group(self._ranks.control)
        return TransferResult(engines, size_bytes)

    def close(self) -> None:
        """Do nothing: no memory stays lent."""


async def _lend_bucket(
    sync: WeightSync, engines: tuple[RolloutEngine, ...], bucket: Bucket, handles: dict[str, IpcHandle]
) -> tuple[RolloutEngine, ...]:
    update: dict[str, Any] = {**bucket.description, "handles": handles}

    async def load_bucket(engine: RolloutEngine) -> None:
        await sync.update(engine, update)

    return await sync.run_on_each(engines, load_bucket)


def export_ipc_handle(data: Tensor) -> tuple[str, IpcHandle]:
    """Return this GPU's UUID and the handle of a flat tensor of bytes on it."""
    # Kernels that write the bucket have to end before another process reads it.
    torch.cuda.current_stream(data.device).synchronize()
    _, arguments = reduce_tensor(data)
    return str(torch.cuda.get_device_properties(data.device).uuid), handle_fields(arguments)


def handle_fields(arguments: tuple[Any, ...]) -> IpcHandle:
    """Return the arguments of torch's rebuild_cuda_tensor for a flat tensor, as JSON can carry them."""
    _, _, _, tensor_offset, _, _, _, storage, size, offset, _, counter, counter_offset, event, waits = arguments
    return {
        "storage": _base64_text(storage),
        "storage_bytes": size,
        "storage_offset": offset,
        "tensor_offset": tensor_offset,
        "counter": _base64_text(counter),
        "counter_offset": counter_offset,
        "event": _base64_text(event),
        "waits_for_event": waits,
    }


def _base64_text(value: bytes) -> str:
    return base64.b64encode(value).decode()
