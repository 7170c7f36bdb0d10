"""Buckets out of the parts of several ranks, and the transports that carry them to stand-in engines."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import BroadcastOptions, ProcessGroupGloo

from moejob_api.contract.addresses import LOOPBACK
from moejob_api.contract.group_rendezvous import join_rendezvous
from moejob_api.contract.pods import weights_key
from moejob_trainer.rollouts.connection import EngineConnection
from moejob_trainer.rollouts.fleet import EngineFleet, FleetLimits
from moejob_trainer.rollouts.publisher import EngineTerms, ProbeTerms, Publisher
from moejob_trainer.rollouts.transports.broadcast import BroadcastTransport, EngineRendezvous, make_gloo_group
from moejob_trainer.rollouts.transports.buckets import (
    Bucket,
    BucketRanks,
    all_gather_bucket,
    gather_bucket,
    pack_buckets,
)
from moejob_trainer.rollouts.transports.ipc import IpcHandle, IpcTransport, handle_fields
from trainer.rollouts.stand_in import StandIn, carried
from trainer.worlds import Worlds

CPU = torch.device("cpu")
KEY = weights_key("secret")
ALONE = BucketRanks(None, None, CPU)
LIMITS = FleetLimits(start_seconds=120, silence_seconds=60, answer_seconds=120, look_seconds=0.02)
WHOLE = {
    "a": torch.arange(6, dtype=torch.float32).reshape(2, 3),
    "b": torch.arange(5, dtype=torch.bfloat16),
    "c": torch.arange(20, dtype=torch.float32),
    "d": torch.tensor([7], dtype=torch.int64),
    "e": torch.arange(4, dtype=torch.bfloat16),
}


def weights(rank: int = 0, ranks: int = 1) -> Iterator[tuple[str, Tensor]]:
    """Tensors in turns: of those of other ranks only name and shape."""
    for number, (name, tensor) in enumerate(WHOLE.items()):
        yield name, tensor if number % ranks == rank else torch.empty(tensor.shape, device="meta")


def unpacked(bucket: Bucket) -> dict[str, Tensor]:
    sizes = [entry.size_bytes for entry in bucket.entries]
    return {
        entry.name: part.clone().view(getattr(torch, entry.dtype)).reshape(entry.shape)
        for entry, part in zip(bucket.entries, bucket.data.split(sizes), strict=True)
    }


def assert_whole(buckets: list[dict[str, Tensor]]) -> None:
    found = {name: tensor for bucket in buckets for name, tensor in bucket.items()}
    assert found.keys() == WHOLE.keys()
    assert all(found[name].dtype == tensor.dtype and found[name].equal(tensor) for name, tensor in WHOLE.items())


def test_buckets_are_bounded_and_a_large_tensor_is_one_of_its_own() -> None:
    found = [unpacked(part) for part in pack_buckets(weights(), 12, CPU)]
    assert [list(bucket) for bucket in found] == [["a", "b"], ["c"], ["d", "e"]]
    assert_whole(found)


def test_a_bucket_keeps_its_values_when_their_owner_uses_the_memory_again() -> None:
    memory = torch.zeros(3)

    def reused() -> Iterator[tuple[str, Tensor]]:
        for number in range(3):
            yield str(number), memory.fill_(number)

    (part,) = pack_buckets(reused(), 100, CPU)
    assert [tensor.tolist() for tensor in unpacked(part).values()] == [[0.0] * 3, [1.0] * 3, [2.0] * 3]


def test_ranks_end_buckets_after_the_same_names_and_the_first_gets_all_of_them(worlds: Worlds) -> None:
    first, *others = worlds.run(3, gathered_buckets)
    assert_whole(first["gathered"])
    assert [set(bucket) for bucket in first["gathered"]] == [{"a", "b"}, {"c"}, {"d", "e"}]
    assert all(other["gathered"] == [] for other in others)
    assert first["sizes"] == [34, 80, 16]
    assert all(other["sizes"] == first["sizes"] for other in others)
    for rank in (first, *others):
        assert_whole(rank["all_gathered"])


def gathered_buckets() -> dict[str, Any]:
    world = dist.new_group(backend="gloo")
    ranks = BucketRanks(world, world, CPU)
    of_first = [gather_bucket(part, ranks) for part in pack_buckets(weights(ranks.rank, 3), 12, CPU)]
    of_all = [all_gather_bucket(part, ranks) for part in pack_buckets(weights(ranks.rank, 3), 12, CPU)]
    return {
        "sizes": [size for size, _ in of_first],
        "gathered": [unpacked(bucket) for _, bucket in of_first if bucket is not None],
        "all_gathered": [unpacked(bucket) for bucket in of_all],
    }


# --- to stand-in engines ----------------------------------------------------------------------------------------------


class Receiver:
    """A stand-in engine with one worker, which joins a group as the engines' plugin does."""

    def __init__(self) -> None:
        self.engine = StandIn(probe=-1.0)
        self.engine.joined = self._join
        self.engine.updated = self._update
        self.buckets: list[dict[str, Tensor]] = []
        self._group: Any = None

    def _join(self, where: dict[str, Any]) -> None:
        def join() -> None:
            port = carried(where["master_address"], where["master_port"], KEY)
            store = PrefixStore(where["name"], TCPStore(LOOPBACK, port, is_master=False))
            join_rendezvous(store, where["world_size"], timedelta(minutes=5))
            self._group = ProcessGroupGloo(store, where["rank_offset"], where["world_size"], timedelta(minutes=5))
            self._receive_bucket(1)

        joining = threading.Thread(target=join, daemon=True)
        joining.start()
        joining.join(300)

    def _update(self, update: dict[str, Any]) -> None:
        dtypes = [getattr(torch, name) for name in update["dtype_names"]]
        sizes = [dtype.itemsize * int(np.prod(shape)) for dtype, shape in zip(dtypes, update["shapes"], strict=True)]
        places = self._receive_bucket(sum(sizes)).split(sizes)
        self.buckets.append(
            {
                name: place.clone().view(dtype).reshape(shape)
                for name, place, dtype, shape in zip(update["names"], places, dtypes, update["shapes"], strict=True)
            }
        )

    def _receive_bucket(self, size: int) -> Tensor:
        bucket, options = torch.empty(size, dtype=torch.uint8), BroadcastOptions()
        options.rootRank = options.rootTensor = 0
        self._group.broadcast([bucket], options).wait()
        return bucket


@pytest.fixture
def receivers() -> Iterator[list[Receiver]]:
    made = [Receiver(), Receiver()]
    yield made
    for one in made:
        one.engine.close()


@pytest.fixture
def fleet(receivers: list[Receiver]) -> Iterator[EngineFleet]:
    connection = EngineConnection("secret")
    made = EngineFleet([one.engine.url for one in receivers], connection, LIMITS)
    yield made
    connection.run(made.stop_watching())
    connection.close()


TRIAL = ProbeTerms(
    np.arange(48, dtype=np.int32), lambda tokens: np.full(len(tokens) - 1, -1.0, np.float32), lambda: 0.001
)


def broadcasting(fleet: EngineFleet) -> Publisher:
    return Publisher(
        fleet=fleet,
        world=None,
        transport=BroadcastTransport(ALONE, EngineRendezvous("127.0.0.1", KEY, 1, make_gloo_group, 60), 12),
        probe_terms=TRIAL,
    )


def test_every_engine_gets_every_bucket_and_joins_once(receivers: list[Receiver], fleet: EngineFleet) -> None:
    publisher = broadcasting(fleet)
    for version in (1, 2):
        assert publisher.publish(version, weights()).size_bytes == 34 + 80 + 16
    for one in receivers:
        assert_whole(one.buckets[:3])
        assert_whole(one.buckets[3:])
        assert one.engine.asked.count("/init_weight_transfer_engine") == 1
    assert len(fleet.serving_engines) == 2


def test_an_engine_that_was_started_again_joins_again(receivers: list[Receiver], fleet: EngineFleet) -> None:
    publisher = broadcasting(fleet)
    publisher.publish(1, weights())
    receivers[0].engine.version = "default"
    publisher.publish(2, weights())
    assert [one.engine.asked.count("/init_weight_transfer_engine") for one in receivers] == [2, 1]
    assert len(fleet.serving_engines) == 2


def test_an_engine_that_fails_between_buckets_serves_no_more_and_the_other_gets_all(
    receivers: list[Receiver], fleet: EngineFleet
) -> None:
    publisher = broadcasting(fleet)
    publisher.publish(1, weights())
    receivers[0].engine.failing["/update_weights"] = 500
    publisher.publish(2, weights())
    assert [engine.url for engine in fleet.serving_engines] == [receivers[1].engine.url]
    assert_whole(receivers[1].buckets[3:])
    del receivers[0].engine.failing["/update_weights"]
    publisher.publish(3, weights())
    assert len(fleet.serving_engines) == 2
    assert_whole(receivers[0].buckets[3:])


def test_engines_open_buckets_by_their_handles(receivers: list[Receiver], fleet: EngineFleet) -> None:
    lent: list[Tensor] = []

    def export(data: Tensor) -> tuple[str, IpcHandle]:
        lent.append(data.clone())
        return "GPU-0", {"storage": str(len(lent) - 1)}

    for one in receivers:
        one.engine.updated = lambda update, one=one: one.buckets.append(
            unpacked_update(update, lent[int(update["handles"]["GPU-0"]["storage"])])
        )
    publisher = Publisher(
        fleet=fleet,
        world=None,
        transport=IpcTransport(ALONE, export, 60, 12),
        probe_terms=TRIAL,
        engine_terms=EngineTerms(gpu_memory=SharedRoom(receivers[0]), is_colocated=True),
    )
    publisher.publish(1, weights())
    for one in receivers:
        assert_whole(one.buckets)


def unpacked_update(update: dict[str, Any], data: Tensor) -> dict[str, Tensor]:
    dtypes = [getattr(torch, name) for name in update["dtype_names"]]
    sizes = [dtype.itemsize * int(np.prod(shape)) for dtype, shape in zip(dtypes, update["shapes"], strict=True)]
    return {
        name: place.clone().view(dtype).reshape(shape)
        for name, place, dtype, shape in zip(update["names"], data.split(sizes), dtypes, update["shapes"], strict=True)
    }


@dataclass
class SharedRoom:
    """The room of a trainer with engines on its GPU: what one of them had been asked for before each part of it."""

    engine: Receiver
    before: dict[str, list[str]] = field(default_factory=dict)

    def free_unused(self) -> None:
        self._note("tidy")

    def release(self) -> None:
        self._note("leave")

    def acquire(self) -> None:
        self._note("enter")

    def _note(self, part: str) -> None:
        self.before[part] = [*self.engine.engine.asked]


def test_weights_leave_the_gpu_before_engines_take_memory_for_keys_and_come_back_when_these_sleep(
    receivers: list[Receiver], fleet: EngineFleet
) -> None:
    for one in receivers:
        one.engine.updated = lambda _: None
    room = SharedRoom(receivers[0])
    publisher = Publisher(
        fleet=fleet,
        world=None,
        transport=IpcTransport(ALONE, lambda _: ("GPU-0", {}), 60),
        probe_terms=TRIAL,
        engine_terms=EngineTerms(gpu_memory=room, is_colocated=True),
    )
    publisher.publish(1, weights())
    publisher.release()
    weights_awake, keys_awake, asleep = "/wake_up?tags=weights", "/wake_up?tags=kv_cache", "/sleep?level=2"
    assert weights_awake not in room.before["tidy"]
    assert weights_awake in room.before["leave"]
    assert keys_awake not in room.before["leave"]
    assert {keys_awake, asleep} <= {*room.before["enter"]}


def test_engines_on_the_trainers_gpus_wake_for_weights_and_sleep_while_it_trains(
    receivers: list[Receiver], fleet: EngineFleet
) -> None:
    for one in receivers:
        one.engine.updated = lambda _: None
    transport = IpcTransport(ALONE, lambda _: ("GPU-0", {}), 60)
    publisher = Publisher(
        fleet=fleet,
        world=None,
        transport=transport,
        probe_terms=TRIAL,
        engine_terms=EngineTerms(gpu_memory=SharedRoom(receivers[0]), is_colocated=True),
    )
    publisher.publish(1, weights())
    publisher.release()
    for one in receivers:
        said = [path for path in one.engine.asked if path not in {"/ready", "/weight_info"}]
        assert said == [
            "/wake_up?tags=weights",
            "/pause?mode=keep",
            "/start_weight_update",
            "/update_weights",
            "/publication",
            "/finish_weight_update",
            "/reset_prefix_cache",
            "/wake_up?tags=kv_cache",
            "/resume",
            "/inference/v1/generate",
            "/sleep?level=2",
        ]


def test_engines_with_memory_of_their_own_never_sleep(receivers: list[Receiver], fleet: EngineFleet) -> None:
    publisher = broadcasting(fleet)
    publisher.publish(1, weights())
    publisher.release()
    assert not {path for path in receivers[0].engine.asked if path.startswith(("/sleep", "/wake_up"))}


def test_a_handle_is_json_and_leaves_nothing_out() -> None:
    shape = (Tensor, torch.Size([10]), (1,), 3, torch.TypedStorage, torch.uint8)
    found = handle_fields((*shape, 0, b"\x00handle", 10, 512, False, b"counter", 16, b"event", True))
    assert found == {
        "storage": "AGhhbmRsZQ==",
        "storage_bytes": 10,
        "storage_offset": 512,
        "tensor_offset": 3,
        "counter": "Y291bnRlcg==",
        "counter_offset": 16,
        "event": "ZXZlbnQ=",
        "waits_for_event": True,
    }
