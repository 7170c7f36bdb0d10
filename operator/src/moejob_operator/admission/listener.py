"""An HTTP listener that strangers may reach: it bounds connections and closes the idle ones.

When all places are taken, the connection gives way that has waited longest for its handshake, a request or the rest of
a request: silent and slow connections keep out neither an API server nor a probe.
"""

from __future__ import annotations

import asyncio
import re
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import Any

from aiohttp import web
from aiohttp.http import HttpProcessingError

Handler = Callable[[web.BaseRequest], Awaitable[web.StreamResponse]]

_BACKLOG = 128
# API servers, kubelets and Prometheus send a kilobyte.
_HEAD_BYTES = 16 * 1024
_END_OF_HEAD = b"\r\n\r\n"
# Bodies in chunks have no length, and no client of this listener sends any.
_BODY_LENGTH = re.compile(rb"\r\ncontent-length:[ \t]*(\d{1,10})[ \t]*\r\n", re.IGNORECASE)
_CLOSING_SECONDS = 2.0
# The client sends no HTTP, or leaves before the end.
_FAULTS_OF_CLIENTS = (HttpProcessingError, ConnectionError)
# The least time that a client has for handshake and request, however many others come.
_REQUEST_SECONDS = 0.25


@dataclass(frozen=True, slots=True)
class ListenerLimits:
    """Bounds of a listener: a connection without a whole request is closed after `idle_seconds`."""

    connections: int = 32
    handshake_seconds: float = 5.0
    idle_seconds: float = 30.0


@dataclass(frozen=True, slots=True)
class _WaitingConnection:
    """A connection without a whole request, since when, and how to end it."""

    since: float
    end: Callable[[], object]


class RequestIntake:
    """Takes the bytes of one request at a time: a head of bounded length, and a body of the length that it says.

    An error of an HTTP parser holds ten times the parser's input until Python's collector runs. So the parser gets the
    bytes of expected requests alone, and a client that sends others is disconnected.
    """

    def __init__(self) -> None:
        self._head = b""
        # Bytes of the body that are still to come; None while the head is awaited.
        self._body_bytes_left: int | None = None
        self._is_answered = False

    @property
    def is_awaiting_body(self) -> bool:
        """Return whether the head of a request is there, and its body is not."""
        return self._body_bytes_left is not None and self._body_bytes_left > 0

    def expect_next_request(self) -> None:
        """Expect the next request after the rest of this body: some requests are answered before it is read."""
        self._is_answered = True
        self._await_next_head()

    def take_bytes(self, data: bytes) -> bool:
        """Return whether all of these bytes belong to a request that may be sent now."""
        if self._body_bytes_left is not None:
            self._body_bytes_left -= len(data)
            is_body = self._body_bytes_left >= 0
            self._await_next_head()
            return is_body
        before = len(self._head)
        self._head += data[: _HEAD_BYTES + 1 - before]
        end = self._head.find(_END_OF_HEAD)
        if end < 0:
            return len(self._head) <= _HEAD_BYTES
        head = self._head[: end + len(_END_OF_HEAD)]
        length = _BODY_LENGTH.search(head)
        self._head, self._body_bytes_left = b"", 0 if length is None else int(length[1])
        return self.take_bytes(data[len(head) - before :])

    def _await_next_head(self) -> None:
        if self._is_answered and self._body_bytes_left == 0:
            self._body_bytes_left, self._is_answered = None, False


class _BoundedHandler(web.RequestHandler):
    """aiohttp's handler, which gets no more than one request at a time."""

    def __init__(self, server: BoundedServer) -> None:
        # No wait for a body that no handler reads: its bytes would take a megabyte a connection.
        super().__init__(
            server,
            loop=asyncio.get_running_loop(),
            access_log=None,  # type: ignore[arg-type]  # no log
            lingering_time=0.0,
        )
        self.intake = RequestIntake()
        self._server = server

    def data_received(self, data: bytes) -> None:
        was_awaiting_body = self.intake.is_awaiting_body
        if not self.intake.take_bytes(data):
            _abort_connection(self)
            return
        super().data_received(data)
        if was_awaiting_body and not self.intake.is_awaiting_body:
            self._server.mark_body_received(self)

    def log_exception(self, *arguments: Any, **options: Any) -> None:
        """Log our own faults alone: strangers could fill the log with their clients' faults."""
        if not isinstance(options.get("exc_info"), _FAULTS_OF_CLIENTS):
            super().log_exception(*arguments, **options)


class BoundedServer(web.Server):
    """Hands requests on, and closes connections without a request."""

    def __init__(self, handler: Handler, limits: ListenerLimits) -> None:
        super().__init__(self._handle_request)
        self.limits = limits
        self._free_places = asyncio.Semaphore(limits.connections)
        self._handler = handler
        # Connections that have taken room.
        self._open_connections: set[web.RequestHandler] = set()
        self._deadlines: dict[web.RequestHandler, asyncio.TimerHandle] = {}
        # Connections without a whole request, the oldest first.
        self._waiting: dict[web.RequestHandler, _WaitingConnection] = {}

    def __call__(self) -> web.RequestHandler:
        """Return the protocol of a new connection."""
        return _BoundedHandler(self)

    def connection_made(self, handler: web.RequestHandler, transport: asyncio.Transport) -> None:
        """Give a connection time for a request."""
        super().connection_made(handler, transport)
        self._await_request(handler)

    def connection_lost(self, handler: web.RequestHandler, exc: BaseException | None = None) -> None:
        """Give the place of the connection to the next."""
        super().connection_lost(handler, exc)
        self._give_room(handler)

    def mark_body_received(self, handler: web.RequestHandler) -> None:
        """Let a connection with a whole, unanswered request keep its place."""
        # A connection with a deadline was answered before its body came: it waits for another request.
        if handler not in self._deadlines:
            self._waiting.pop(handler, None)

    async def greet_connection(
        self, connection: socket.socket, context: ssl.SSLContext | None, group: asyncio.TaskGroup
    ) -> None:
        """Begin to serve a connection, when there is room."""
        await self._take_room()
        handler = self()
        self._open_connections.add(handler)
        greeting = group.create_task(self._shake_hands(handler, connection, context))
        self._mark_waiting(handler, greeting.cancel)

        def free_unserved(_: object) -> None:
            # A served connection frees its place when it is lost; a connection that was reset at once has done so.
            if handler.transport is None:
                connection.close()
                self._give_room(handler)

        greeting.add_done_callback(free_unserved)

    def _give_room(self, handler: web.RequestHandler) -> None:
        """Free the place of a connection, once only: a second time would raise the bound."""
        self._stop_waiting(handler)
        if handler in self._open_connections:
            self._open_connections.remove(handler)
            self._free_places.release()

    async def _take_room(self) -> None:
        """Wait for room: the connection that has waited longest makes it, once it has had time for a request."""
        while self._free_places.locked():
            oldest = next(iter(self._waiting.values()), None)
            since = asyncio.get_running_loop().time()
            seconds_left = _REQUEST_SECONDS if oldest is None else oldest.since + _REQUEST_SECONDS - since
            if oldest is not None and seconds_left <= 0:
                oldest.end()
                break
            with suppress(TimeoutError):
                async with asyncio.timeout(seconds_left):
                    await self._free_places.acquire()
                    return
        await self._free_places.acquire()

    async def _shake_hands(
        self, handler: web.RequestHandler, connection: socket.socket, context: ssl.SSLContext | None
    ) -> None:
        seconds = None if context is None else self.limits.handshake_seconds
        # No TLS, or none in time.
        with suppress(OSError):
            await asyncio.get_running_loop().connect_accepted_socket(
                lambda: handler, connection, ssl=context, ssl_handshake_timeout=seconds
            )

    def _await_request(self, handler: web.RequestHandler) -> None:
        loop = asyncio.get_running_loop()
        self._deadlines[handler] = loop.call_later(self.limits.idle_seconds, _abort_connection, handler)
        self._mark_waiting(handler, partial(_abort_connection, handler))

    def _mark_waiting(self, handler: web.RequestHandler, end: Callable[[], object]) -> None:
        # Counted from its arrival: the end of the handshake is no request yet.
        before = self._waiting.get(handler)
        since = asyncio.get_running_loop().time() if before is None else before.since
        self._waiting[handler] = _WaitingConnection(since, end)

    def _stop_waiting(self, handler: web.RequestHandler) -> None:
        self._waiting.pop(handler, None)
        if handler in self._deadlines:
            self._deadlines.pop(handler).cancel()

    async def _handle_request(self, request: web.BaseRequest) -> web.StreamResponse:
        connection = request.protocol
        self._stop_waiting(connection)
        if isinstance(connection, _BoundedHandler) and connection.intake.is_awaiting_body:
            self._mark_waiting(connection, partial(_abort_connection, connection))
        try:
            return await self._handler(request)
        finally:
            if connection.transport is not None:
                self._await_request(connection)
                if isinstance(connection, _BoundedHandler):
                    connection.intake.expect_next_request()


@asynccontextmanager
async def open_listener(
    server: BoundedServer, host: str | None, port: int, context: ssl.SSLContext | None = None
) -> AsyncIterator[int]:
    """Serve while the block runs, on all addresses of this machine unless one is given. Yields the port.

    Over TLS with a context.
    """
    runner = web.ServerRunner(server, shutdown_timeout=_CLOSING_SECONDS)
    await runner.setup()
    with _open_socket(host, port) as listener:
        accepting = asyncio.create_task(_accept_connections(listener, server, context))
        try:
            yield listener.getsockname()[1]
        finally:
            accepting.cancel()
            await asyncio.wait({accepting})
            await runner.cleanup()


async def _accept_connections(listener: socket.socket, server: BoundedServer, context: ssl.SSLContext | None) -> None:
    async with asyncio.TaskGroup() as group:
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
            await server.greet_connection(connection, context, group)


def _open_socket(host: str | None, port: int) -> socket.socket:
    is_dual = host is None and socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if is_dual else socket.AF_INET
    listener = socket.create_server((host or "", port), family=family, backlog=_BACKLOG, dualstack_ipv6=is_dual)
    listener.setblocking(False)
    return listener


def _abort_connection(handler: web.RequestHandler) -> None:
    if handler.transport is not None:
        handler.transport.abort()
