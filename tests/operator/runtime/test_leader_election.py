"""Leader election: what a candidate decides, and that no two ever act at once, on clocks that jump and go wrong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moejob_operator.cluster import Conflict, Retryable
from moejob_operator.runtime.leader_election import (
    AcquireLease,
    ApiLeaseStore,
    Election,
    Lease,
    LeaseDurations,
    LeaseObservation,
    Move,
    RenewLease,
    WaitForLease,
    lease_spec,
    next_move,
    observe_lease,
)
from stand_in_api import Answer, StandInServer, refusal_answer, serve_stand_in
from virtual_time import run_virtually

TERMS = LeaseDurations()
NOW = datetime(2026, 11, 21, 8, 30, tzinfo=UTC)


def lease(holder: str = "other", seconds: int = 13, version: str = "1", transitions: int = 4) -> Lease:
    return Lease(holder, seconds, transitions, version)


# --- deciding -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        pytest.param(LeaseObservation(None, 100), AcquireLease(None), id="there is no lease"),
        pytest.param(LeaseObservation(lease(""), 100), AcquireLease(lease("")), id="it was released"),
        pytest.param(LeaseObservation(lease("me"), 0), RenewLease(lease("me")), id="it is ours, however old"),
        pytest.param(LeaseObservation(lease(), 100), WaitForLease(113), id="another's, just renewed"),
        pytest.param(LeaseObservation(lease(), 87.1), WaitForLease(100.1), id="another's, almost over"),
        pytest.param(
            LeaseObservation(lease(), 87), AcquireLease(lease()), id="another's, not renewed for its whole time"
        ),
        pytest.param(
            LeaseObservation(lease(seconds=60), 50), WaitForLease(110), id="another's, which was promised more"
        ),
        pytest.param(
            LeaseObservation(lease(seconds=1), 90), WaitForLease(103), id="another's, which says less than we grant"
        ),
    ],
)
def test_a_candidate_decides_by_what_it_saw_and_when(seen: LeaseObservation, expected: Move) -> None:
    assert next_move(seen, "me", TERMS, now=100) == expected


@pytest.mark.parametrize(
    ("now_read", "since"),
    [
        pytest.param(lease(), 10, id="unchanged: seen since the first time"),
        pytest.param(lease(version="2"), 20, id="renewed: seen since now"),
        pytest.param(lease(holder="third", version="3"), 20, id="taken by another"),
        pytest.param(None, 20, id="deleted"),
    ],
)
def test_only_a_change_of_the_lease_is_a_sign_of_life(now_read: Lease | None, since: float) -> None:
    assert observe_lease(LeaseObservation(lease(), 10), now_read, now=20) == LeaseObservation(now_read, since)


@pytest.mark.parametrize(
    ("over", "transitions", "acquires"),
    [
        pytest.param(None, 0, True, id="a first leader"),
        pytest.param(lease("me"), 4, False, id="a renewal"),
        pytest.param(lease("other"), 5, True, id="a change of leader"),
        pytest.param(lease(""), 5, True, id="after a release"),
    ],
)
def test_the_lease_says_who_leads_since_when(over: Lease | None, transitions: int, acquires: bool) -> None:
    spec = lease_spec(TERMS, "me", over, NOW)
    assert spec["holderIdentity"] == "me"
    assert spec["renewTime"] == "2026-11-21T08:30:00.000000Z"
    assert spec["leaseTransitions"] == transitions
    assert ("acquireTime" in spec) is acquires


@pytest.mark.parametrize("spec", [{}, None, {"holderIdentity": None, "leaseDurationSeconds": None}])
def test_a_lease_that_says_nothing_is_nobodys(spec: Mapping[str, Any] | None) -> None:
    assert Lease.from_body({"metadata": {"resourceVersion": "7"}, "spec": spec}) == Lease("", 0, 0, "7")


# --- electing -------------------------------------------------------------------------------------------------------


@dataclass
class Etcd:
    """One Lease, and what the network does to those who ask for it."""

    spec: dict[str, Any] | None = None
    version: int = 0
    # Who is cut off from it: requests hang.
    cut_off: set[str] = field(default_factory=set)

    def raw(self) -> dict[str, Any]:
        assert self.spec is not None
        return {"metadata": {"resourceVersion": str(self.version)}, "spec": dict(self.spec)}

    @property
    def holder(self) -> str:
        return (self.spec or {}).get("holderIdentity") or ""


@dataclass
class Store:
    """The Lease as one candidate reaches it, over a network of its own mood."""

    etcd: Etcd
    name: str
    weather: random.Random | None = None
    answers_lost: int = 0

    async def read(self) -> dict[str, Any] | None:
        await self._travel()
        found = None if self.etcd.spec is None else self.etcd.raw()
        await self._travel()
        return found

    async def create(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        await self._travel()
        if self.etcd.spec is not None:
            raise Conflict
        return await self._stored(spec)

    async def write(self, spec: Mapping[str, Any], version: str) -> dict[str, Any]:
        await self._travel()
        if self.etcd.spec is None or version != str(self.etcd.version):
            raise Conflict
        return await self._stored({**self.etcd.spec, **spec})

    async def _stored(self, spec: Mapping[str, Any]) -> dict[str, Any]:
        self.etcd.spec = dict(spec)
        self.etcd.version += 1
        raw = self.etcd.raw()
        if self.answers_lost > 0:
            self.answers_lost -= 1
            raise Retryable("the answer was lost")
        await self._travel()
        return raw

    async def _travel(self) -> None:
        if self.name in self.etcd.cut_off:
            await asyncio.sleep(1_000_000)
        weather = self.weather
        if weather is None:
            await asyncio.sleep(0.01)
            return
        await asyncio.sleep(weather.choice([0.0, 0.01, 0.2, 1.0, 4.0, 30.0]))
        if weather.random() < 0.2:
            raise Retryable


@dataclass
class Replica:
    """A candidate for leader. `led` has the times in which it led, and `may_act` says whether it may write."""

    etcd: Etcd
    name: str
    weather: random.Random | None = None
    # Its clock is off by this much, and this much too fast.
    clock_offset: float = 0.0
    clock_rate: float = 1.0
    # Work that takes this long to end when it is cancelled.
    reluctance: float = 0.0
    led: list[tuple[float, float]] = field(default_factory=list)
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.store = Store(self.etcd, self.name, self.weather)
        self.election = Election(self.store, self.name, TERMS, clock=self.clock, chance=lambda: 1.0)
        self.task = asyncio.ensure_future(self.election.run(self.lead))

    def clock(self) -> float:
        return self.clock_offset + now() * self.clock_rate

    @property
    def may_act(self) -> bool:
        return self.election.remaining_seconds() > 0

    async def lead(self) -> None:
        begun = now()
        try:
            await self.stopped.wait()
        except asyncio.CancelledError:
            await asyncio.sleep(self.reluctance)
            raise
        finally:
            self.led.append((begun, now()))

    async def kill(self) -> None:
        """As SIGKILL does it: nothing is said to anybody."""
        self.etcd.cut_off.add(self.name)
        self.task.cancel()
        await asyncio.wait({self.task})
        self.election._leads_until = float("-inf")  # noqa: SLF001


def now() -> float:
    return asyncio.get_running_loop().time()


async def until(condition: Any, seconds: float = 100) -> float:
    """Return how long it took."""
    begun = now()
    while not condition():
        assert now() < begun + seconds, "too late"
        await asyncio.sleep(0.01)
    return now() - begun


def test_one_leads_and_goes_on_leading_while_the_other_waits() -> None:
    async def story() -> None:
        etcd = Etcd()
        first = Replica(etcd, "first")
        await until(lambda: first.may_act)
        second = Replica(etcd, "second")
        for _ in range(10_000):
            await asyncio.sleep(0.1)
            assert first.may_act
            assert not second.may_act
        assert etcd.holder == "first"

    run_virtually(story())


@pytest.mark.parametrize("kill_after", [0.0, 0.4, 1.0, 1.7, 1.99, 2.0, 2.01, 3.1])
def test_a_follower_takes_over_within_15_seconds_of_a_killed_leader(kill_after: float) -> None:
    async def story() -> None:
        etcd = Etcd()
        first = Replica(etcd, "first")
        await until(lambda: first.may_act)
        second = Replica(etcd, "second")
        await asyncio.sleep(20 + kill_after)
        await first.kill()
        assert await until(lambda: second.may_act) < 15

    run_virtually(story())


def test_a_follower_takes_over_at_once_when_the_leader_stops() -> None:
    async def story() -> None:
        etcd = Etcd()
        first = Replica(etcd, "first")
        await until(lambda: first.may_act)
        second = Replica(etcd, "second")
        await asyncio.sleep(20)
        first.election.stop()
        for _ in range(50):
            await asyncio.sleep(0.1)
            assert first.may_act, "work in hand goes on"
        first.stopped.set()
        assert await until(lambda: second.may_act) < 1.5
        await first.task
        assert first.led

    run_virtually(story())


def test_a_leader_cut_off_from_the_api_stops_all_work_before_anybody_else_leads() -> None:
    async def story() -> None:
        etcd = Etcd()
        first = Replica(etcd, "first")
        await until(lambda: first.may_act)
        second = Replica(etcd, "second")
        await asyncio.sleep(20)
        etcd.cut_off.add("first")
        ended = await until(lambda: first.led)
        assert 8 <= ended <= 10.1
        assert not first.may_act
        assert not second.may_act
        taken_over = ended + await until(lambda: second.may_act)
        assert taken_over < 15
        etcd.cut_off.clear()
        await asyncio.sleep(100)
        assert [replica.name for replica in (first, second) if replica.may_act] == ["second"]

    run_virtually(story())


def test_work_that_does_not_end_may_write_nothing_from_the_deadline_on() -> None:
    async def story() -> None:
        etcd = Etcd()
        first = Replica(etcd, "first", reluctance=500)
        await until(lambda: first.may_act)
        etcd.cut_off.add("first")
        await until(lambda: not first.may_act, 11)
        for _ in range(1000):
            await asyncio.sleep(0.1)
            assert not first.may_act

    run_virtually(story())


def test_a_leader_whose_lease_was_taken_by_hand_stops_at_its_next_renewal() -> None:
    async def story() -> None:
        etcd = Etcd()
        first = Replica(etcd, "first")
        await until(lambda: first.may_act)
        assert etcd.spec is not None
        etcd.spec["holderIdentity"] = "somebody"
        etcd.version += 1
        assert await until(lambda: first.led) < 2.5
        assert not first.may_act

    run_virtually(story())


def test_a_renewal_whose_answer_is_lost_does_not_end_a_leader() -> None:
    async def story() -> None:
        etcd = Etcd()
        first = Replica(etcd, "first")
        await until(lambda: first.may_act)
        first.store.answers_lost = 2
        for _ in range(300):
            await asyncio.sleep(0.1)
            assert first.may_act
        assert not first.led

    run_virtually(story())


def test_a_candidate_whose_acquisition_was_not_answered_leads_all_the_same() -> None:
    async def story() -> None:
        etcd = Etcd()
        first = Replica(etcd, "first")
        first.store.answers_lost = 1
        assert await until(lambda: first.may_act) < 3

    run_virtually(story())


def test_the_clocks_of_replicas_need_not_agree() -> None:
    async def story() -> None:
        etcd = Etcd()
        first = Replica(etcd, "first", clock_offset=1e6)
        await until(lambda: first.may_act)
        second = Replica(etcd, "second", clock_offset=-1e6)
        await asyncio.sleep(20)
        assert not second.may_act
        await first.kill()
        assert await until(lambda: second.may_act) < 15

    run_virtually(story())


def test_what_the_work_of_a_leader_raises_ends_the_process_and_frees_the_lease() -> None:
    async def story() -> None:
        etcd = Etcd()

        async def broken() -> None:
            raise ZeroDivisionError

        election = Election(Store(etcd, "first"), "first", TERMS, clock=now)
        with pytest.raises(ZeroDivisionError):
            await election.run(broken)
        assert etcd.holder == ""

    run_virtually(story())


# --- the Lease in an API server -------------------------------------------------------------------------------------

LEASES = "/apis/coordination.k8s.io/v1/namespaces/moejob-system/leases"


@asynccontextmanager
async def api_store() -> AsyncIterator[tuple[StandInServer, ApiLeaseStore]]:
    async with serve_stand_in() as (server, api):
        yield server, ApiLeaseStore(api, "moejob-system", "moejob-operator")


def answered(version: int, **spec: Any) -> tuple[int, dict[str, Any]]:
    """A Lease; without a spec as the API server answers who asked for metadata only."""
    return 200, {"metadata": {"resourceVersion": str(version)}, **({"spec": spec} if spec else {})}


def test_a_lease_that_is_not_there_is_created_and_then_ours() -> None:
    async def story() -> None:
        async with api_store() as (server, store):
            server.set_answers(f"POST {LEASES}", answered(1))
            assert await store.read() is None
            created = Lease.from_body(await store.create(lease_spec(TERMS, "me", None, NOW)))
            assert created == Lease("me", 13, 0, "1")
            assert server.requests[-1].body["metadata"] == {"name": "moejob-operator", "namespace": "moejob-system"}

    asyncio.run(story())


def test_a_lease_is_written_only_as_it_was_read_and_keeps_what_others_say_in_it() -> None:
    async def story() -> None:
        async with api_store() as (server, store):
            server.set_answers(f"GET {LEASES}/moejob-operator", answered(4, holderIdentity="other"))
            server.set_answers(f"PATCH {LEASES}/moejob-operator", answered(5, holderIdentity="me"))
            found = Lease.from_body(await store.read() or {})
            assert Lease.from_body(await store.write({"holderIdentity": "me"}, found.version)).holder == "me"
            assert server.requests[-1].body == {"metadata": {"resourceVersion": "4"}, "spec": {"holderIdentity": "me"}}
            assert server.requests[-1].headers["Content-Type"] == "application/merge-patch+json"

    asyncio.run(story())


@pytest.mark.parametrize(
    ("answer", "raised"),
    [
        pytest.param(refusal_answer(409, "Conflict"), Conflict, id="changed since"),
        pytest.param(refusal_answer(409, "AlreadyExists"), Conflict, id="created by another"),
        pytest.param(refusal_answer(404, "NotFound"), Conflict, id="deleted"),
        pytest.param(refusal_answer(500, "InternalError"), Retryable, id="no answer"),
    ],
)
def test_a_lease_that_was_not_written_is_told(answer: Answer, raised: type[Exception]) -> None:
    async def story() -> None:
        async with api_store() as (server, store):
            if answer[1]["reason"] == "AlreadyExists":
                server.set_answers(f"POST {LEASES}", answer)
                with pytest.raises(raised):
                    await store.create({})
                return
            server.set_answers(f"PATCH {LEASES}/moejob-operator", answer)
            with pytest.raises(raised):
                await store.write({}, "4")

    asyncio.run(story())


# --- any weather ----------------------------------------------------------------------------------------------------


@given(
    seed=st.integers(0, 2**32),
    rates=st.lists(st.floats(0.95, 1.05), min_size=3, max_size=3),
    cuts=st.lists(st.tuples(st.integers(0, 2), st.floats(1, 40), st.booleans()), max_size=12),
)
def test_no_two_may_ever_act_at_once(seed: int, rates: list[float], cuts: list[tuple[int, float, bool]]) -> None:
    """Requests are slow, lost or refused, replicas are cut off and come back, clocks are off by up to 5 %."""

    async def story() -> None:
        etcd, weather = Etcd(), random.Random(seed)
        replicas = [
            Replica(etcd, f"replica-{index}", weather, clock_offset=index * 1000, clock_rate=rate, reluctance=3)
            for index, rate in enumerate(rates)
        ]

        async def watch() -> None:
            while True:
                assert sum(replica.may_act for replica in replicas) <= 1
                await asyncio.sleep(0.05)

        watching = asyncio.ensure_future(watch())
        for index, seconds, is_cut_off in cuts:
            (etcd.cut_off.add if is_cut_off else etcd.cut_off.discard)(f"replica-{index}")
            await asyncio.sleep(seconds)
        etcd.cut_off.clear()
        for replica in replicas:
            replica.store.weather = None
        # When all is well again, one replica leads, without help.
        await until(lambda: any(replica.may_act for replica in replicas), 60)
        assert not watching.done()
        for replica in replicas:
            replica.task.cancel()
        watching.cancel()
        await asyncio.wait({watching, *(replica.task for replica in replicas)})

    run_virtually(story())
