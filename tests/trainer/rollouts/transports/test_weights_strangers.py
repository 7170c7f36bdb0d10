"""A stranger who can connect to rank 0 neither reads nor falsifies where its engines meet it to get weights."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from moejob_api.contract.addresses import LOOPBACK
from moejob_api.contract.pods import engine_key, weights_key
from moejob_trainer.rollouts.fleet import EngineFleet
from moejob_trainer.rollouts.transports.group_store import GroupStore
from moejob_trainer.runtime.channel import prove_to_server
from trainer.rollouts.stand_in import carried
from trainer.rollouts.transports.test_buckets import (
    KEY,
    Receiver,
    assert_whole,
    broadcasting,
    fleet,
    receivers,
    weights,
)

__all__ = ["fleet", "receivers"]
# The address of a pod, as far as it is not the one that its own processes meet at.
POD = "127.0.0.2"


@pytest.fixture
def place() -> Iterator[GroupStore]:
    made = GroupStore(POD, KEY, timedelta(minutes=5))
    yield made
    made.close()


def test_a_stranger_cannot_write_where_rank_0_and_an_engine_meet(receivers: list[Receiver], fleet: EngineFleet) -> None:
    join = receivers[0].engine.joined
    refused: list[dict[str, Any]] = []

    def preceded_by_a_stranger(where: dict[str, Any]) -> None:
        with pytest.raises(RuntimeError):
            falsify(where)
        refused.append(where)
        assert join is not None
        join(where)

    receivers[0].engine.joined = preceded_by_a_stranger
    broadcasting(fleet).publish(1, weights())
    assert len(refused) == 1
    assert len(fleet.serving_engines) == 2
    assert_whole(receivers[0].buckets)


def falsify(where: dict[str, Any]) -> None:
    """Write a key of the group, without a proof."""
    place = TCPStore(where["master_address"], where["master_port"], is_master=False, timeout=timedelta(seconds=3))
    PrefixStore(where["name"], place).set("0", "where a stranger listens")


def test_who_proves_the_key_reaches_the_store(place: GroupStore) -> None:
    reached = TCPStore(LOOPBACK, carried(POD, place.port, KEY), is_master=False, timeout=timedelta(minutes=5))
    place.store.set("a", "b")
    assert reached.get("a") == b"b"


@pytest.mark.parametrize(
    "key",
    [
        pytest.param(weights_key("a guess"), id="another secret"),
        pytest.param(weights_key(""), id="no secret"),
        pytest.param(engine_key("secret").encode(), id="the key of engines, which goes over the network"),
    ],
)
def test_who_proves_another_key_is_turned_away(place: GroupStore, key: bytes) -> None:
    async def introduced() -> None:
        await prove_to_server(*await asyncio.open_connection(POD, place.port), key)

    with pytest.raises(asyncio.IncompleteReadError):
        asyncio.run(introduced())


def test_the_store_itself_is_not_at_the_address_of_the_pod(place: GroupStore) -> None:
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((POD, place.store.port), timeout=60)


def test_no_one_is_let_in_any_more_after_the_group_has_been_left() -> None:
    place = GroupStore(POD, KEY, timedelta(minutes=5))
    place.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((POD, place.port), timeout=60)


def test_engines_that_are_in_are_let_go_without_a_word_when_the_group_is_left(caplog: pytest.LogCaptureFixture) -> None:
    before = {*threading.enumerate()}
    place = GroupStore(POD, KEY, timedelta(minutes=5))

    async def let_go() -> bytes:
        reader, writer = await asyncio.open_connection(POD, place.port)
        await prove_to_server(reader, writer, KEY)
        await asyncio.to_thread(place.close)
        return await asyncio.wait_for(reader.read(), 120)

    [connections] = [found for found in threading.enumerate() if found.name == "connections" and found not in before]
    assert asyncio.run(let_go()) == b""
    connections.join(120)
    assert caplog.records == []
