"""Weights by broadcast from rank 0 to the workers of each engine: over Gloo between CPUs, over NCCL between GPUs.

An engine has a process group of its own with rank 0, so one that dies in the middle ends its own group and no other.
The engine learns the group's address and name over HTTP. HTTP and the store at that address both ask for a key, which
is derived from the job's secret.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar
from uuid import uuid4

import torch
from torch import Tensor
from torch._C._distributed_c10d import Backend, PrefixStore, Store
from torch.distributed import BroadcastOptions

from moejob_api.contract.group_rendezvous import cancel_rendezvous, join_rendezvous
from moejob_trainer.rollouts.connection import EngineLost
from moejob_trainer.rollouts.fleet import RolloutEngine
from moejob_trainer.rollouts.publisher import TransferResult
from moejob_trainer.rollouts.sync import WeightSync
from moejob_trainer.rollouts.transports.buckets import BUCKET_ELEMENTS, Bucket, BucketRanks, gather_bucket, pack_buckets
from moejob_trainer.rollouts.transports.group_store import GroupStore
from moejob_trainer.rollouts.wire import WeightsLabel

T = TypeVar("T")
# Makes a group of a store, a rank and a size.
MakeGroup = Callable[[Store, int, int], Backend]

# Only the last resort: HTTP notices an engine whose worker is gone long before.
_GROUP_TIMEOUT = timedelta(minutes=10)


@dataclass(frozen=True, slots=True)
class EngineRendezvous:
    """The address of rank 0, the key that both sides prove, and the workers of each engine."""

    host: str
    key: bytes
    workers: int
    make_group: MakeGroup
    start_seconds: float


@dataclass(frozen=True, slots=True, eq=False)
class _EngineGroup:
    """The group of one engine, and its store."""

    group: Backend
    store: GroupStore
    # The weights that the engine had last. An engine with other weights was started since, and knows no group.
    label: str


class BroadcastTransport:
    """Sends bucket by bucket. No rank keeps whole weights, so engines that were away wait for the next publication."""

    def __init__(self, ranks: BucketRanks, rendezvous: EngineRendezvous, most_elements: int = BUCKET_ELEMENTS) -> None:
        self._ranks, self._rendezvous, self._most_elements = ranks, rendezvous, most_elements
        self._groups: dict[str, _EngineGroup] = {}

    @property
    def stacked_elements(self) -> int:
        """Return the elements of a bucket: engines take as long for one tensor as for a stack of them."""
        return self._most_elements

    def send(
        self, label: WeightsLabel, weights: Iterable[tuple[str, Tensor]], sync: WeightSync | None
    ) -> TransferResult:
        """Let all engines join their groups, and send them the weights bucket by bucket. Collective."""
        engines = () if sync is None else sync.run(self._start_update(sync))
        size_bytes = 0
        for part in pack_buckets(weights, self._most_elements, self._ranks.device):
            size, bucket = gather_bucket(part, self._ranks)
            size_bytes += size
            if sync is not None and bucket is not None and bucket.entries:
                engines = sync.run(self._send_bucket(sync, engines, bucket))
        self._groups = {
            engine.url: _EngineGroup(self._groups[engine.url].group, self._groups[engine.url].store, str(label))
            for engine in engines
        }
        return TransferResult(engines, size_bytes)

    def close(self) -> None:
        """Leave all groups."""
        for url in [*self._groups]:
            self._leave_group(url)

    async def _start_update(self, sync: WeightSync) -> tuple[RolloutEngine, ...]:
        async def join_engine(engine: RolloutEngine) -> None:
            joined = self._groups.get(engine.url)
            if joined is None or joined.label != await sync.get_label(engine):
                self._leave_group(engine.url)
                self._groups[engine.url] = await self._join_engine(sync, engine)

        return await sync.run_on_each(await sync.start_update(self._rendezvous.start_seconds), join_engine)

    async def _join_engine(self, sync: WeightSync, engine: RolloutEngine) -> _EngineGroup:
        size, name = 1 + self._rendezvous.workers, f"weights-{uuid4()}"
        store = GroupStore(self._rendezvous.host, self._rendezvous.key, _GROUP_TIMEOUT)
        rendezvous = {
            "master_address": self._rendezvous.host,
            "master_port": store.port,
            "name": name,
            "rank_offset": 1,
            "world_size": size,
        }
        prefixed_store = PrefixStore(name, store.store)
        making_group = _run_in_thread(lambda: self._make_group(prefixed_store, size))
        try:
            group = await _wait_for_both(sync.join_group(engine, rendezvous), making_group, engine)
        except BaseException as error:
            with suppress(RuntimeError):
                # Over a second connection: the waiting thread holds the first one.
                second_connection = prefixed_store.clone()  # type: ignore[attr-defined]  # not in torch's stubs
                cancel_rendezvous(second_connection, f"rank 0 has given the engine up: {error!r}")
            store.close()
            raise
        return _EngineGroup(group, store, "")

    def _make_group(self, store: Store, size: int) -> Backend:
        join_rendezvous(store, size, _GROUP_TIMEOUT)
        return self._rendezvous.make_group(store, 0, size)

    async def _send_bucket(
        self, sync: WeightSync, engines: tuple[RolloutEngine, ...], bucket: Bucket
    ) -> tuple[RolloutEngine, ...]:
        async def send_to_engine(engine: RolloutEngine) -> None:
            group = self._groups[engine.url].group
            sending = _run_in_thread(lambda: _broadcast_tensor(group, bucket.data))
            try:
                await _wait_for_both(sync.update(engine, bucket.description), sending, engine)
            except BaseException:
                # Aborting an NCCL group ends a thread that still sends; in a Gloo group it waits until its timeout.
                self._leave_group(engine.url)
                raise

        return await sync.run_on_each(engines, send_to_engine)

    def _leave_group(self, url: str) -> None:
        joined = self._groups.pop(url, None)
        if joined is not None:
            with suppress(RuntimeError):
                joined.group.abort()
            joined.store.close()


def make_gloo_group(store: Store, rank: int, size: int) -> Backend:
    """Make a group of CPUs."""
    return _connect_group(torch.distributed.ProcessGroupGloo(store, rank, size, _GROUP_TIMEOUT), torch.device("cpu"))


def nccl_group_maker(device: torch.device) -> MakeGroup:
    """Return the maker of groups of GPUs."""

    def make_group(store: Store, rank: int, size: int) -> Backend:
        options = torch.distributed.ProcessGroupNCCL.Options()
        options._timeout = _GROUP_TIMEOUT  # noqa: SLF001  # it has no public name
        return _connect_group(torch.distributed.ProcessGroupNCCL(store, rank, size, options), device)

    return make_group


def _connect_group(group: Any, device: torch.device) -> Backend:
    """Use a group once: NCCL connects when something is sent."""
    _broadcast_tensor(group, torch.zeros(1, dtype=torch.uint8, device=device))
    return group  # type: ignore[no-any-return]


def _broadcast_tensor(group: Any, data: Tensor) -> None:
    options = BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    if data.device.type != "cuda":
        group.broadcast([data], options).wait()
        return
    with torch.cuda.device(data.device):
        group.broadcast([data], options).wait()
        torch.cuda.current_stream().synchronize()


async def _wait_for_both(asking: Any, working: asyncio.Future[T], engine: RolloutEngine) -> T:
    """Wait for an engine's reply and for this side of the same transfer; EngineLost when either fails."""
    engine_task = asyncio.ensure_future(asking)
    await asyncio.wait({engine_task, working}, return_when=asyncio.FIRST_EXCEPTION)
    if engine_task.done():
        # The engine's own error says more than the broken connection that follows from it.
        engine_task.result()
    if not engine_task.done():
        # A dead engine breaks both, and this side first.
        with suppress(asyncio.CancelledError):
            engine_task.cancel()
            await engine_task
    try:
        return working.result()
    except RuntimeError as error:
        raise EngineLost(f"{engine.url} has left the group that weights travel in: {error}") from None


def _run_in_thread(work: Callable[[], T]) -> asyncio.Future[T]:
    """Work in a daemon thread: threads of an executor would keep the process from ending."""
    done: Future[T] = Future()

    def run_work() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  # its awaiter gets it
            done.set_exception(error)
        else:
            done.set_result(result)

    threading.Thread(target=run_work, name="weights", daemon=True).start()
    future = asyncio.wrap_future(done)
    # No task awaits it once its engine is lost; asyncio warns of exceptions that are never read.
    future.add_done_callback(lambda done_future: done_future.cancelled() or done_future.exception())
    return future
