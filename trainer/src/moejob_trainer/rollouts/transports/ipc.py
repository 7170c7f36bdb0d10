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
from moejob_trainer.rollouts.publisher import Sent
from moejob_trainer.rollouts.sync import WeightSync
from moejob_trainer.rollouts.transports.buckets import BUCKET_ELEMENTS, Bucket, Ranks, all_gathered, parts
from moejob_trainer.rollouts.wire import WeightsLabel

# The name of a GPU, and what another process needs to open a tensor there.
Handle = dict[str, str | int | bool]
_NAMED: TypeAdapter[tuple[str, Handle]] = TypeAdapter(tuple[str, Handle])
Export = Callable[[Tensor], tuple[str, Handle]]


class IpcTransport:
    """Lends bucket by bucket. No rank keeps whole weights, so engines that were away wait for the next publication."""

    def __init__(
        self, ranks: Ranks, export: Export, start_seconds: float, most_elements: int = BUCKET_ELEMENTS
    ) -> None:
        self._ranks, self._export, self._start_seconds = ranks, export, start_seconds
        self._most_elements = most_elements

    @property
    def stacked_elements(self) -> int:
        """Return the elements of a bucket: engines take as long for one tensor as for a stack of them."""
        return self._most_elements

    def send(self, label: WeightsLabel, weights: Iterable[tuple[str, Tensor]], sync: WeightSync | None) -> Sent:  # noqa: ARG002
        """Start an update on all engines and let them load all weights; the caller finishes the update. Collective."""
        engines = () if sync is None else sync.run(sync.begin(self._start_seconds))
        size_bytes = 0
        for part in parts(weights, self._most_elements, self._ranks.device):
            bucket = all_gathered(part, self._ranks)
            if not bucket.entries:
                continue
            size_bytes += bucket.data.nbytes
            handles = messages.gather(self._export(bucket.data), _NAMED, self._ranks.control)
            if sync is not None and handles is not None:
                engines = sync.run(_lent(sync, engines, bucket, dict(handles)))
            # Until engines have read it, the memory must not be used for anything else.
            messages.barrier(self._ranks.control)
        return Sent(engines, size_bytes)

    def close(self) -> None:
        """Do nothing: no memory stays lent."""


async def _lent(
    sync: WeightSync, engines: tuple[RolloutEngine, ...], bucket: Bucket, handles: dict[str, Handle]
) -> tuple[RolloutEngine, ...]:
    update: dict[str, Any] = {**bucket.description, "handles": handles}

    async def load(engine: RolloutEngine) -> None:
        await sync.update(engine, update)

    return await sync.each(engines, load)


def export(data: Tensor) -> tuple[str, Handle]:
    """Return this GPU's UUID and the handle of a flat tensor of bytes on it."""
    # Kernels that write the bucket have to end before another process reads it.
    torch.cuda.current_stream(data.device).synchronize()
    _, arguments = reduce_tensor(data)
    return str(torch.cuda.get_device_properties(data.device).uuid), handle(arguments)


def handle(arguments: tuple[Any, ...]) -> Handle:
    """Return the arguments of torch's rebuild_cuda_tensor for a flat tensor, as JSON can carry them."""
    _, _, _, tensor_offset, _, _, _, storage, size, offset, _, counter, counter_offset, event, waits = arguments
    return {
        "storage": _text(storage),
        "storage_bytes": size,
        "storage_offset": offset,
        "tensor_offset": tensor_offset,
        "counter": _text(counter),
        "counter_offset": counter_offset,
        "event": _text(event),
        "waits_for_event": waits,
    }


def _text(value: bytes) -> str:
    return base64.b64encode(value).decode()
