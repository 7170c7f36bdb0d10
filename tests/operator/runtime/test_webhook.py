"""The webhook serves when there is a certificate, and the right one at any time, without a restart."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

import aiohttp
from aiohttp import web
from cryptography import x509

from moejob_operator.certificates import KeyPair, hosts_of, made, utc_now
from moejob_operator.cluster import Forbidden, Retryable
from moejob_operator.webhook import Webhook

HOSTS = hosts_of("moejob-webhook", "moejob-system")
FIRST, SECOND = made(HOSTS, utc_now()), made(HOSTS, utc_now())


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

    async def keep(self, hosts: tuple[str, ...], now: datetime) -> KeyPair:
        self.made += 1
        self.pair = self.pair or made(hosts, now)
        return self.pair


@dataclass
class Served:
    """A webhook that runs."""

    store: FakeStore = field(default_factory=FakeStore)
    leads: bool = False
    ends: list[float] = field(default_factory=list)
    check_seconds: float = 0.02

    def __post_init__(self) -> None:
        app = web.Application()
        app.add_routes([web.get("/", self.answer)])
        self.webhook = Webhook(
            app,
            self.store,  # type: ignore[arg-type]
            HOSTS,
            0,
            lambda: self.leads,
            self.ends.append,
            host="127.0.0.1",
            tick_seconds=0.01,
            check_seconds=self.check_seconds,
        )
        self.task = asyncio.ensure_future(self.webhook.run())

    async def answer(self, _: web.Request) -> web.Response:
        return web.Response(text="ok")

    async def serves(self, pair: KeyPair) -> bool:
        """Whether somebody who trusts this pair's authority is answered with this pair."""
        if self.webhook.served_port is None:
            return False
        url = f"https://127.0.0.1:{self.webhook.served_port}/"
        trust = ssl.create_default_context(cadata=pair.authority.decode())
        try:
            async with (
                aiohttp.ClientSession() as session,
                session.get(url, ssl=trust, server_hostname=HOSTS[0]) as said,
            ):
                return said.status == 200
        except aiohttp.ClientSSLError:
            return False

    async def end(self) -> None:
        self.task.cancel()
        await asyncio.wait({self.task})


async def until(condition: Callable[[], Any]) -> None:
    deadline = asyncio.get_running_loop().time() + 5
    while not await condition():
        assert asyncio.get_running_loop().time() < deadline
        await asyncio.sleep(0.01)


def test_a_follower_serves_as_soon_as_the_leader_has_stored_a_certificate() -> None:
    async def story() -> None:
        served = Served()
        await asyncio.sleep(0.1)
        assert served.webhook.pair is None
        assert served.webhook.served_port is None
        served.store.pair = FIRST
        await until(lambda: served.serves(FIRST))
        assert served.store.made == 0
        assert served.ends == [FIRST.ends.timestamp()]
        await served.end()

    asyncio.run(story())


def test_a_leader_makes_the_certificate_itself() -> None:
    async def story() -> None:
        served = Served(leads=True)

        async def is_served() -> bool:
            return served.webhook.pair is not None and await served.serves(served.webhook.pair)

        await until(is_served)
        assert served.store.made >= 1
        await served.end()

    asyncio.run(story())


def test_a_new_leader_keeps_the_certificate_at_once() -> None:
    """There may be one already, that a new webhook configuration does not trust yet."""

    async def story() -> None:
        served = Served(FakeStore(FIRST), check_seconds=3600)
        await until(lambda: served.serves(FIRST))
        assert served.store.made == 0
        served.leads = True

        async def is_kept() -> bool:
            return served.store.made > 0

        await until(is_kept)
        await served.end()

    asyncio.run(story())


def test_a_new_certificate_is_served_without_a_restart() -> None:
    async def story() -> None:
        served = Served(FakeStore(FIRST))
        await until(lambda: served.serves(FIRST))
        port = served.webhook.served_port
        served.store.pair = SECOND
        await until(lambda: served.serves(SECOND))
        assert not await served.serves(FIRST)
        assert served.webhook.served_port == port
        await served.end()

    asyncio.run(story())


def test_a_secret_that_cannot_be_read_for_a_while_changes_nothing() -> None:
    async def story() -> None:
        served = Served(FakeStore(FIRST))
        await until(lambda: served.serves(FIRST))
        for failure in (Retryable("slow"), Forbidden("not yours")):
            served.store.failure = failure
            await asyncio.sleep(0.1)
            assert await served.serves(FIRST)
        served.store.failure, served.store.pair = None, None
        await asyncio.sleep(0.1)
        assert await served.serves(FIRST), "a Secret that somebody emptied is no reason to stop"
        await served.end()

    asyncio.run(story())


def test_both_pairs_of_this_test_are_different() -> None:
    numbers = {x509.load_pem_x509_certificate(pair.certificate).serial_number for pair in (FIRST, SECOND)}
    assert len(numbers) == 2
