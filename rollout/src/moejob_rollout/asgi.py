"""Requests and replies as an ASGI server hands them to its application."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]


class Reply:
    """The reply to one request, after which a connection is kept open or not."""

    def __init__(self, send: Send, *, keeps_open: bool) -> None:
        self._send, self._keeps_open = send, keeps_open

    async def __call__(self, status: HTTPStatus, text: str) -> None:
        """Send it."""
        body = f"{text}\n".encode()
        headers = [(b"content-type", b"text/plain"), (b"content-length", str(len(body)).encode())]
        closing = [] if self._keeps_open else [(b"connection", b"close")]
        start = {"type": "http.response.start", "status": status.value, "headers": headers + closing}
        await self._send(start)
        await self._send({"type": "http.response.body", "body": body})
