"""The server of an engine without its engine: uvicorn as vLLM starts it, the guard, and paths that compute nothing."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from typing import Any, Self

import uvicorn
import uvloop
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from moejob_api.contract.pods import Environment, engine_key
from moejob_rollout.authentication import KeyAuthentication
from moejob_rollout.listener import HEAD_BYTES, StrangerLimits, server_settings

SECRET = "5" * 64
KEY = f"Authorization: Bearer {engine_key(SECRET)}\r\n".encode()
HOST = "127.0.0.1"


class Client:
    """Stands for the engine behind vLLM's server."""

    def __init__(self) -> None:
        self.errored = False
        self.asked = self.given_up = 0
        # An answer waits until it may come.
        self.may_answer = threading.Event()
        self.failing: Exception | None = None

    async def generate(self, *_: Any) -> AsyncIterator[Any]:
        self.asked += 1
        try:
            await _set(self.may_answer)
        except asyncio.CancelledError:
            self.given_up += 1
            raise
        if self.failing is not None:
            raise self.failing
        yield SimpleNamespace()


class EngineServer:
    """A server in a thread, and what its paths have seen."""

    def __init__(self, limits: StrangerLimits) -> None:
        self.client, self.bodies = Client(), list[int]()
        os.environ[Environment.SECRET] = SECRET
        paths = {"/count": self._count, "/hold": self._hold, "/fail": self._fail}
        app = Starlette(routes=[Route(path, serve, methods=["GET", "POST"]) for path, serve in paths.items()])
        app.add_middleware(KeyAuthentication)
        app.state.engine_client = self.client
        self.may_go = threading.Event()
        settings = server_settings(limits)
        self.config = uvicorn.Config(
            app, HOST, 0, log_level="error", log_config=None, h11_max_incomplete_event_size=HEAD_BYTES, **settings
        )
        self._server = _Quiet(self.config)
        self._thread = threading.Thread(target=lambda: uvloop.run(self.serve()), daemon=True)

    @property
    def began(self) -> threading.Event:
        return self._server.began

    async def serve(self) -> None:
        await self._server.serve()

    def start(self) -> Self:
        self._thread.start()
        self.began.wait(600)
        return self

    @property
    def port(self) -> int:
        return int(self._server.servers[0].sockets[0].getsockname()[1])

    @property
    def connections(self) -> int:
        return len(self._server.server_state.connections)

    def stop(self) -> None:
        self.may_go.set()
        self.client.may_answer.set()
        self._server.should_exit = True
        self._thread.join(60)

    async def _count(self, request: Request) -> PlainTextResponse:
        with suppress(ClientDisconnect):
            self.bodies.append(len(await request.body()))
        return PlainTextResponse("counted")

    async def _hold(self, _: Request) -> PlainTextResponse:
        self.bodies.append(0)
        await _set(self.may_go)
        return PlainTextResponse("held")

    async def _fail(self, _: Request) -> PlainTextResponse:
        raise RuntimeError("it fails")


class _Quiet(uvicorn.Server):
    """uvicorn's, which says that it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.began = threading.Event()

    async def startup(self, sockets: Any = None) -> None:
        await super().startup(sockets)
        self.began.set()


async def _set(event: threading.Event) -> None:
    # Not in a thread: there are fewer than clients that wait.
    while not event.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0.005)


@contextmanager
def served(limits: StrangerLimits) -> Iterator[EngineServer]:
    server = EngineServer(limits).start()
    try:
        yield server
    finally:
        server.stop()
