"""Connections of the server: those without the job's key are bounded in number, bytes and time.

uvicorn bounds none of these, and vLLM allows heads of 4 MiB. Connections with the key are not bounded: the trainer
opens one for each answer that it waits for. A new connection costs an engine 50 microseconds, so with 512 places the
oldest has had 25 ms for its request before it gives way.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from functools import partial
from typing import Any, TypedDict

from uvicorn.protocols.http.h11_impl import H11Protocol

from moejob_rollout.asgi import announce_closing

# In the state of each request: the visitor on whose connection it came.
VISITOR = "moejob_visitor"
# Browsers send 1 kB.
HEAD_BYTES = 16 * 1024
# The core is gone by then, so a request without an answer gets none.
_LAST_ANSWERS_SECONDS = 1
# Connections that wait to be accepted. One turn of the event loop accepts all: fewer than may be open.
_BACKLOG = 128


@dataclass(frozen=True, slots=True)
class StrangerLimits:
    """Bounds of connections on which the key has not been seen."""

    connections: int = 512
    # From the start of the connection to the last byte of its response.
    seconds: float = 10.0


class Strangers:
    """Open connections on which the key has not been seen, the oldest first."""

    def __init__(self, limits: StrangerLimits) -> None:
        self._limits = limits
        self._open: dict[Visitor, _Stranger] = {}

    def add(self, visitor: Visitor, transport: asyncio.Transport) -> None:
        """Give a connection its time; where there are too many, the oldest is ended."""
        deadline = asyncio.get_running_loop().call_later(self._limits.seconds, transport.abort)
        self._open[visitor] = _Stranger(transport, deadline)
        if len(self._open) > self._limits.connections:
            oldest = next(iter(self._open))
            self._open[oldest].transport.abort()
            self.remove(oldest)

    def remove(self, visitor: Visitor) -> None:
        """Bound a connection no longer: it has shown the key, or is closed."""
        stranger = self._open.pop(visitor, None)
        if stranger is not None:
            stranger.deadline.cancel()


class Visitor:
    """The client of one connection, as requests know it."""

    def __init__(self, strangers: Strangers) -> None:
        self._strangers = strangers

    def has_key(self) -> None:
        """Keep the connection for as long as the client wants it."""
        self._strangers.remove(self)


@dataclass(frozen=True, slots=True)
class _Stranger:
    transport: asyncio.Transport
    deadline: asyncio.TimerHandle


class BoundedProtocol(H11Protocol):
    """uvicorn's protocol; requests get their visitor, errors say that they end the connection, and no HTTP ends it."""

    def __init__(self, strangers: Strangers, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._strangers, self._visitor = strangers, Visitor(strangers)
        self.app_state = {**self.app_state, VISITOR: self._visitor}
        self.app = announce_closing(self.app)

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's own
        """Count a connection among strangers."""
        super().connection_made(transport)
        self._strangers.add(self._visitor, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Count the connection no longer, if it is still among strangers."""
        self._strangers.remove(self._visitor)
        super().connection_lost(exc)

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002  # uvicorn's own sends it
        """Send none: another response may be under way, and h11 allows no second."""
        self.transport.abort()


class ServerSettings(TypedDict):
    """Arguments of uvicorn's server."""

    http: Any
    ws: str
    backlog: int
    timeout_graceful_shutdown: int


def server_settings(limits: StrangerLimits | None = None) -> ServerSettings:
    """Return the arguments with which uvicorn, and vLLM's server above it, bounds strangers and its own end."""
    # h11, also where uvicorn would choose httptools, which keeps heads of any length.
    protocol = partial(BoundedProtocol, Strangers(limits or StrangerLimits()))
    return {"http": protocol, "ws": "none", "backlog": _BACKLOG, "timeout_graceful_shutdown": _LAST_ANSWERS_SECONDS}
