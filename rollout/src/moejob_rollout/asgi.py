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


def announce_closing(app: App) -> App:
    """Say with each error of the server that it ends the connection.

    Starlette answers an exception and raises it again, and uvicorn then closes the connection. A client that does not
    know sends its next request there, and loses it.
    """

    async def serve_announced(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_announced(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= HTTPStatus.INTERNAL_SERVER_ERROR:
                others = [header for header in message.get("headers", ()) if header[0].lower() != b"connection"]
                message = {**message, "headers": [*others, (b"connection", b"close")]}
            await send(message)

        await app(scope, receive, send_announced)

    return serve_announced
