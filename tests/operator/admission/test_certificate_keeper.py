"""The right certificate is kept at any time, without a restart."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime

from cryptography import x509

from moejob_operator.admission.certificate_keeper import CertificateKeeper
from moejob_operator.admission.certificates import KeyPair, make_pair, service_hosts, utc_now
from moejob_operator.cluster import Forbidden, Retryable

HOSTS = service_hosts("moejob-webhook", "moejob-system")
FIRST, SECOND = make_pair(HOSTS, utc_now()), make_pair(HOSTS, utc_now())


@dataclass
class FakeStore:
    """A Secret that others write."""

    pair: KeyPair | None = None
    secret: str = "certificate"
    made: int = 0
    failure: Exception | None = None

    async def read(self) -> KeyPair | None:
        if self.failure is not None:
            raise self.failure
        return self.pair

    async def ensure_certificate(self, hosts: tuple[str, ...], now: datetime) -> KeyPair:
        self.made += 1
        self.pair = self.pair or make_pair(hosts, now)
        return self.pair


@dataclass
class Kept:
    """A keeper that runs."""

    store: FakeStore = field(default_factory=FakeStore)
    leads: bool = False
    ends: list[float] = field(default_factory=list)
    check_seconds: float = 0.02

    def __post_init__(self) -> None:
        self.keeper = CertificateKeeper(
            self.store,  # type: ignore[arg-type]
            HOSTS,
            lambda: self.leads,
            self.ends.append,
            tick_seconds=0.01,
            check_seconds=self.check_seconds,
        )
        self.task = asyncio.ensure_future(self.keeper.run())

    async def until(self, condition: Callable[[], bool]) -> None:
        deadline = asyncio.get_running_loop().time() + 60
        while not condition():
            assert not self.task.done()
            assert asyncio.get_running_loop().time() < deadline
            await asyncio.sleep(0.01)

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})


def test_a_follower_has_a_certificate_as_soon_as_the_leader_has_stored_one() -> None:
    async def story() -> None:
        kept = Kept()
        await asyncio.sleep(0.1)
        assert not kept.keeper.certified.is_set()
        kept.store.pair = FIRST
        await kept.until(kept.keeper.certified.is_set)
        assert kept.keeper.pair == FIRST
        assert kept.store.made == 0
        assert kept.ends == [FIRST.ends_at.timestamp()]
        await kept.end()

    asyncio.run(story())


def test_a_leader_makes_the_certificate_itself() -> None:
    async def story() -> None:
        kept = Kept(leads=True)
        await kept.until(kept.keeper.certified.is_set)
        assert kept.store.made >= 1
        await kept.end()

    asyncio.run(story())


def test_a_new_leader_keeps_the_certificate_at_once() -> None:
    """There may be one already, that a new webhook configuration does not trust yet."""

    async def story() -> None:
        kept = Kept(FakeStore(FIRST), check_seconds=3600)
        await kept.until(kept.keeper.certified.is_set)
        assert kept.store.made == 0
        kept.leads = True
        await kept.until(lambda: kept.store.made > 0)
        await kept.end()

    asyncio.run(story())


def test_a_new_certificate_is_loaded_without_a_restart() -> None:
    async def story() -> None:
        kept = Kept(FakeStore(FIRST))
        await kept.until(lambda: kept.keeper.pair == FIRST)
        kept.store.pair = SECOND
        await kept.until(lambda: kept.keeper.pair == SECOND)
        assert kept.ends == [FIRST.ends_at.timestamp(), SECOND.ends_at.timestamp()]
        await kept.end()

    asyncio.run(story())


def test_a_secret_that_cannot_be_read_for_a_while_changes_nothing() -> None:
    async def story() -> None:
        kept = Kept(FakeStore(FIRST))
        await kept.until(lambda: kept.keeper.pair == FIRST)
        for failure in (Retryable("slow"), Forbidden("not yours")):
            kept.store.failure = failure
            await asyncio.sleep(0.1)
            assert kept.keeper.pair == FIRST
        kept.store.failure, kept.store.pair = None, None
        await asyncio.sleep(0.1)
        assert kept.keeper.pair == FIRST, "a Secret that somebody emptied is no reason to stop"
        await kept.end()

    asyncio.run(story())


def test_both_pairs_of_this_test_are_different() -> None:
    numbers = {x509.load_pem_x509_certificate(pair.certificate).serial_number for pair in (FIRST, SECOND)}
    assert len(numbers) == 2
