"""A listener for HTTP that strangers may reach: it bounds connections and closes those that only wait."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from aiohttp import web

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_BACKLOG = 128
_CLOSING_SECONDS = 2.0


@dataclass(frozen=True, slots=True)
class ListenerLimits:
    """Bounds of a listener: a connection without a whole request is closed after `idle_seconds`."""

    connections: int = 64
    handshake_seconds: float = 5.0
    idle_seconds: float = 30.0


class BoundedServer(web.Server):
    """Hands requests on, and closes connections on which nothing is asked."""

    def __init__(self, handler: Handler, limits: ListenerLimits) -> None:
        super().__init__(self._handled, access_log=None)
        self.limits = limits
        # Taken by a connection before it is accepted: what waits costs nothing here.
        self.room = asyncio.Semaphore(limits.connections)
        self._handler = handler
        self._deadlines: dict[web.RequestHandler, asyncio.TimerHandle] = {}

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Give a connection time for a request."""
        super().connection_made(handler, transport)
        self._await_request(handler)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Make room for another."""
        super().connection_lost(handler, exc)
        self._deadlines.pop(handler).cancel()
        self.room.release()

    def _await_request(self, handler: web.RequestHandler) -> None:
        loop = asyncio.get_running_loop()
        self._deadlines[handler] = loop.call_later(self.limits.idle_seconds, _abort, handler)

    async def _handled(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        self._deadlines[connection].cancel()
        try:
            return await self._handler(request)
        finally:
            if connection in self._deadlines:
                self._await_request(connection)


@asynccontextmanager
async def listening(server: BoundedServer, host: str | None, port: int, context: ssl.SSLContext) -> AsyncIterator[int]:
    """Serve over TLS while the block runs, on all addresses of this machine unless one is given. Yields the port."""
    runner = web.ServerRunner(server, shutdown_timeout=_CLOSING_SECONDS)
    await runner.setup()
    with _socket(host, port) as listener:
        accepting = asyncio.create_task(_accept(listener, server, context))
        try:
            yield listener.getsockname()[1]
        finally:
            accepting.cancel()
            await asyncio.wait({accepting})
            await runner.cleanup()


async def _accept(listener: socket.socket, server: BoundedServer, context: ssl.SSLContext) -> None:
    async with asyncio.TaskGroup() as greetings:
        while True:
            await server.room.acquire()
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            greetings.create_task(_greet(connection, server, context))


async def _greet(connection: socket.socket, server: BoundedServer, context: ssl.SSLContext) -> None:
    try:
        await asyncio.get_running_loop().connect_accepted_socket(
            server, connection, ssl=context, ssl_handshake_timeout=server.limits.handshake_seconds
        )
    except OSError:
        # No TLS, or none in time. Of one that succeeded, connection_lost will make the room.
        server.room.release()


def _socket(host: str | None, port: int) -> socket.socket:
    is_dual = host is None and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    listener = socket.create_server((host or "", port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual)
    listener.setblocking(False)
    return listener


def _abort(handler: web.RequestHandler) -> None:
    if handler.transport is not None:
        handler.transport.abort()
