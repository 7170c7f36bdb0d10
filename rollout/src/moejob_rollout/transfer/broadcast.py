"""Weights by broadcast from the trainer, in buckets: over Gloo for engines on CPUs, over NCCL for engines on GPUs.

All workers of an engine join one process group, in which the trainer is rank 0. A bucket is one flat tensor of bytes,
so that a thousand small tensors are one message.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import BroadcastOptions, ProcessGroupGloo
from vllm.distributed.weight_transfer.base import WeightTransferInitInfo, WeightTransferUpdateInfo

from moejob_api.contract.addresses import LOOPBACK
from moejob_api.contract.group_rendezvous import join_rendezvous
from moejob_api.contract.pods import Environment, weights_key
from moejob_rollout.transfer.buckets import bucket_bytes, changed_tensors, unpack_bucket
from moejob_rollout.transfer.channel import open_carrier
from moejob_rollout.transfer.checkpoint import CheckpointTransfer
from moejob_rollout.transfer.presence import TrainerGoneError, TrainerPresence

_PATIENCE = timedelta(minutes=10)
_CONNECT = timedelta(seconds=20)
# All workers of an engine are asked at once, and each has reached rank 0, or has failed, in less.
_ARRIVAL = timedelta(minutes=2)


@dataclass
class BroadcastInit(WeightTransferInitInfo):
    """The rendezvous of the group, and its name there. `rank_offset` is the rank of the engine's first worker."""

    master_address: str
    master_port: int
    name: str
    rank_offset: int
    world_size: int


@dataclass
class BroadcastUpdate(WeightTransferUpdateInfo):
    """One bucket of a broadcast: its tensors in their order, and the checksums of its parts."""

    names: list[str]
    dtype_names: list[str]
    shapes: list[list[int]]
    # Those of a sender without checksums are not looked at.
    part_bytes: list[int] = field(default_factory=list)
    checksums: list[list[int]] = field(default_factory=list)


class GlooTransfer(CheckpointTransfer[BroadcastInit, BroadcastUpdate]):
    """Receives buckets in memory of the host."""

    init_info_cls = BroadcastInit
    update_info_cls = BroadcastUpdate
    _group: Any = None
    _presence: TrainerPresence
    # Its connection shows that the trainer is there.
    _store: Store | None = None

    def init_transfer_engine(self, init_info: BroadcastInit) -> None:
        """Join the trainer; a second time after the trainer has been restarted."""
        # A trainer that was killed has left its end of the group.
        self._group, self._store, self._presence = None, None, TrainerPresence()
        key = weights_key(os.environ.get(Environment.SECRET, ""))
        port = open_carrier(init_info.master_address, init_info.master_port, key, self._presence.mark_gone)
        # A store that goes away meanwhile is tried again for this long.
        store = TCPStore(LOOPBACK, port, is_master=False, timeout=_CONNECT, wait_for_workers=False)
        store.set_timeout(_PATIENCE)
        self._store = store
        named_store = PrefixStore(init_info.name, store)
        join_rendezvous(named_store, init_info.world_size, _ARRIVAL)
        rank = init_info.rank_offset + self.parallel_config.rank
        self._group = self._join_group(named_store, rank, init_info.world_size)
        # NCCL connects when something is sent.
        self._receive_bucket(1)

    def receive_weights(self, update_info: BroadcastUpdate) -> None:
        """Receive one bucket and load its tensors."""
        if self._group is None:
            raise RuntimeError("weights before the trainer was joined; call /init_weight_transfer_engine first")
        self.note_tensors(update_info.names)
        bucket = self._receive_bucket(bucket_bytes(update_info))
        self.note_changed(changed_tensors(bucket, update_info))
        self.load_bucket(unpack_bucket(bucket, update_info, self.stacks))

    def _join_group(self, store: Store, rank: int, size: int) -> Any:
        return ProcessGroupGloo(store, rank, size, _PATIENCE)

    def _bucket_device(self) -> torch.device:
        return torch.device("cpu")

    def _receive_bucket(self, size: int) -> Tensor:
        bucket = torch.empty(size, dtype=torch.uint8, device=self._bucket_device())
        options = BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        group = self._group
        self._await_receipt(lambda: group.broadcast([bucket], options).wait())
        return bucket

    def _await_receipt(self, receive: Callable[[], None]) -> None:
        self._presence.wait_for_message(receive)


class NcclTransfer(GlooTransfer):
    """Receives buckets in memory of the worker's GPU."""

    def _join_group(self, store: Store, rank: int, size: int) -> Any:
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = _PATIENCE  # noqa: SLF001  # it has no public name
        return torch.distributed.ProcessGroupNCCL(store, rank, size, options)

    def _bucket_device(self) -> torch.device:
        return torch.device(self.device)

    def _await_receipt(self, receive: Callable[[], None]) -> None:
        stream = torch.cuda.current_stream(self._bucket_device())

        def receive_and_synchronize() -> None:
            with torch.cuda.stream(stream):
                receive()
            # Later work on the GPU waits by itself. The host waits here to notice a trainer that leaves.
            stream.synchronize()

        try:
            super()._await_receipt(receive_and_synchronize)
        except TrainerGoneError:
            # A kernel waits for the rest of the bucket, and all work on the GPU waits for the kernel.
            self._group.abort()
            raise
