"""A proxy before the API server that misbehaves on demand: refuses, loses answers, ends watches, or says nothing."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

import aiohttp
from aiohttp import web

from cluster.control_plane.plane import ControlPlane

CONFLICT = (409, "Conflict")
TOO_MANY = (429, "TooManyRequests")
BROKEN = (500, "InternalError")
_PASSED_ON = ("Content-Type", "Accept", "Authorization")


@dataclass
class FaultyProxy:
    """`share` of the requests go wrong; while it `is_cut` none is answered and none reaches the API server."""

    plane: ControlPlane
    chance: random.Random
    share: float = 0.0
    is_cut: bool = False
    url: str = ""
    faults: Counter[str] = field(default_factory=Counter)

    @property
    def codes(self) -> set[str]:
        """The codes that were answered."""
        return {fault.split()[1] for fault in self.faults}

    async def answer(self, request: web.Request) -> web.StreamResponse:
        """Return what the operator gets."""
        while self.is_cut:
            await asyncio.sleep(0.05)
            if request.transport is None:
                raise ConnectionResetError
        fault = self._fault(request)
        if fault is None:
            return await self._passed_on(request)
        code, reason = fault
        self.faults[f"{request.method} {code}"] += 1
        # Half of the answers are lost: it was done, and the client does not know.
        if request.method != "GET" and self.chance.random() < 0.5:
            await self._done_in_secret(request)
        said = {"kind": "Status", "status": "Failure", "code": code, "reason": reason, "message": "a fault of the test"}
        return web.Response(status=code, text=json.dumps(said), content_type="application/json")

    def _fault(self, request: web.Request) -> tuple[int, str] | None:
        if self.chance.random() >= self.share:
            return None
        # Reading gives no conflict; a watch can be answered that it is too old.
        if "watch" in request.query:
            return (410, "Expired")
        return self.chance.choice((TOO_MANY, BROKEN) if request.method == "GET" else (CONFLICT, TOO_MANY, BROKEN))

    async def _done_in_secret(self, request: web.Request) -> None:
        async with self._asked(request) as answer:
            await answer.read()

    async def _passed_on(self, request: web.Request) -> web.StreamResponse:
        async with self._asked(request) as answer:
            passed = web.StreamResponse(status=answer.status, headers={"Content-Type": answer.content_type})
            # The client may have given up.
            with suppress(ConnectionResetError):
                await passed.prepare(request)
                async for chunk in answer.content.iter_any():
                    if self.is_cut or ("watch" in request.query and self.chance.random() < self.share / 3):
                        break
                    await passed.write(chunk)
            return passed

    def _asked(self, request: web.Request) -> aiohttp.client._RequestContextManager:
        session: aiohttp.ClientSession = request.app[SESSION]
        headers = {name: request.headers[name] for name in _PASSED_ON if name in request.headers}
        body = request.content if request.can_read_body else None
        return session.request(request.method, f"{self.plane.url}{request.path_qs}", headers=headers, data=body)


SESSION = web.AppKey("session", aiohttp.ClientSession)


@contextmanager
def faulty_proxy(plane: ControlPlane, seed: int) -> Iterator[FaultyProxy]:
    """A proxy that passes everything on until a test changes that."""
    proxy = FaultyProxy(plane, random.Random(seed))
    started, stop = threading.Event(), asyncio.Event()
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_until_complete, args=(_serve(proxy, started, stop),), daemon=True)
    thread.start()
    assert started.wait(10)
    try:
        yield proxy
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()


async def _serve(proxy: FaultyProxy, started: threading.Event, stop: asyncio.Event) -> None:
    trusted = aiohttp.TCPConnector(ssl=ssl.create_default_context(cafile=proxy.plane.ca), limit=0)
    async with aiohttp.ClientSession(connector=trusted, timeout=aiohttp.ClientTimeout(total=None)) as session:
        app = web.Application()
        app[SESSION] = session
        app.router.add_route("*", "/{path:.*}", proxy.answer)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        proxy.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        started.set()
        await stop.wait()
        await runner.cleanup()
