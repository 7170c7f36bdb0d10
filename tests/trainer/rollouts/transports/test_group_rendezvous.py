"""Ranks of a group of weights wait for one another, and no longer when one does not come."""

from __future__ import annotations

import threading
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import pytest
from torch._C._distributed_c10d import PrefixStore, TCPStore

from moejob_api.contract.addresses import LOOPBACK
from moejob_api.contract.group_rendezvous import RankMissing, cancel_rendezvous, join_rendezvous
from moejob_trainer.rollouts.fleet import EngineFleet
from moejob_trainer.rollouts.interface import EnginesLost
from moejob_trainer.rollouts.publisher import Publisher
from moejob_trainer.rollouts.transports.broadcast import BroadcastTransport, EngineRendezvous, make_gloo_group
from moejob_trainer.runtime.loopback_store import loopback_store
from trainer.rollouts.stand_in import carried, until
from trainer.rollouts.transports.test_buckets import ALONE, KEY, TRIAL, Receiver, fleet, receivers, weights

__all__ = ["fleet", "receivers"]
# Longer than any test waits.
NEVER = timedelta(hours=1)


@pytest.fixture
def store() -> TCPStore:
    return loopback_store(NEVER)


def one_more(store: TCPStore) -> PrefixStore:
    """A connection of another rank."""
    return PrefixStore("group", TCPStore(LOOPBACK, store.port, is_master=False, wait_for_workers=False))


def arriving(pool: ThreadPoolExecutor, store: TCPStore, patience: timedelta = NEVER) -> Future[None]:
    return pool.submit(join_rendezvous, one_more(store), 2, patience)


def test_all_go_once_the_last_has_arrived_and_no_one_can_give_up_after_that(store: TCPStore) -> None:
    with ThreadPoolExecutor() as pool:
        first = arriving(pool, store)
        join_rendezvous(one_more(store), 2, NEVER)
        cancel_rendezvous(one_more(store), "too late")
        assert first.result(120) is None


def test_those_who_wait_and_those_who_come_later_learn_why_one_does_not(store: TCPStore) -> None:
    with ThreadPoolExecutor() as pool:
        first = arriving(pool, store)
        cancel_rendezvous(one_more(store), "worker 1 has no route")
        with pytest.raises(RankMissing, match="worker 1 has no route"):
            first.result(120)
        with pytest.raises(RankMissing, match="worker 1 has no route"):
            arriving(pool, store).result(120)


def test_a_rank_that_no_one_joins_waits_for_a_time(store: TCPStore) -> None:
    with ThreadPoolExecutor() as pool, pytest.raises(RuntimeError, match="wait timeout"):
        arriving(pool, store, timedelta(milliseconds=50)).result(120)


# --- rank 0 and an engine of two workers ------------------------------------------------------------------------------


class HalfAnEngine:
    """A worker that arrives, and one that does not get so far: the engine refuses."""

    def __init__(self) -> None:
        self.reason = ""
        self._reached = threading.Event()

    def join(self, where: dict[str, Any]) -> None:
        threading.Thread(target=self._arrive, args=(where,), daemon=True).start()
        assert self._reached.wait(120)
        raise RuntimeError("worker 1 has no route")

    def _arrive(self, where: dict[str, Any]) -> None:
        port = carried(where["master_address"], where["master_port"], KEY)
        store = PrefixStore(where["name"], TCPStore(LOOPBACK, port, is_master=False, timeout=NEVER))
        self._reached.set()
        try:
            join_rendezvous(store, where["world_size"], NEVER)
        except RuntimeError as error:
            self.reason = str(error)


def test_no_rank_of_a_group_waits_for_a_worker_that_could_not_join(
    receivers: list[Receiver], fleet: EngineFleet
) -> None:
    half = HalfAnEngine()
    receivers[0].engine.joined = half.join
    # The other one has refused before anyone waits for it.
    receivers[1].engine.failing["/init_weight_transfer_engine"] = 500
    rendezvous = EngineRendezvous(LOOPBACK, KEY, 2, make_gloo_group, 60)
    publisher = Publisher(
        fleet=fleet, world=None, transport=BroadcastTransport(ALONE, rendezvous, 12), probe_terms=TRIAL
    )
    with pytest.raises(EnginesLost, match="no engine has kept the weights"):
        publisher.publish(1, weights())
    until(lambda: half.reason != "", "a worker waits for one that has failed")
    until(lambda: not [one for one in threading.enumerate() if one.name == "weights"], "rank 0 waits for an engine")
