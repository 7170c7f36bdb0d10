"""HTTP to engines from a thread of its own: connections outlive the event loops and the steps of their users."""

from __future__ import annotations

import json
from collections.abc import Coroutine, Mapping
from http import HTTPStatus
from typing import Any, TypeVar

import aiohttp

from moejob_api.contract.engines import CLIENT_IDLE_SECONDS
from moejob_api.contract.pods import engine_key
from moejob_trainer.runtime.loop_thread import LoopThread

T = TypeVar("T")
_CONNECT_SECONDS = 10.0
# The largest reply: 128k tokens with the experts of 94 layers, eight of them each, take 130 MB.
_ANSWER_BYTES = 512 * 1024**2


class EngineLost(Exception):
    """An engine that does not reply, or replies with an error of its own; another engine can take the request."""


class RequestOverdue(EngineLost):
    """A reply that has not come in its time, from an engine that may reply to other requests."""


class RequestRefused(ValueError):
    """A request that an engine rejects, as every other engine would."""


class EngineConnection:
    """An event loop in a thread, and the HTTP requests that it makes until it is closed."""

    def __init__(self, secret: str | None) -> None:
        self._headers = {} if secret is None else {"Authorization": f"Bearer {engine_key(secret)}"}
        self._session: aiohttp.ClientSession | None = None
        self._loop = LoopThread("engines")

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run in this thread's loop and wait for the result. From any other thread."""
        return self._loop.run(coroutine)

    async def await_result(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Run in this thread's loop and await the result in another one, whose cancellation cancels it here."""
        return await self._loop.await_result(coroutine)

    def close(self) -> None:
        """Cancel unfinished requests and end the thread."""
        self._loop.close(self._close_session)

    async def get(self, url: str, seconds: float) -> bytes:
        """Return the body of a page."""
        return await self._send_request("GET", url, None, seconds)

    async def post(self, url: str, body: Mapping[str, Any] | None, seconds: float) -> bytes:
        """Return the body of the response."""
        return await self._send_request("POST", url, body or {}, seconds)

    async def _send_request(self, method: str, url: str, body: Mapping[str, Any] | None, seconds: float) -> bytes:
        timeout = aiohttp.ClientTimeout(total=seconds, sock_connect=_CONNECT_SECONDS)
        try:
            async with self._open_session().request(method, url, json=body, timeout=timeout) as response:
                content = await _read_response(url, response)
        except TimeoutError:
            raise RequestOverdue(f"{url} has not answered in {seconds:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineLost(f"{url} cannot be reached: {error}") from None
        _check_status(url, response.status, content)
        return content

    def _open_session(self) -> aiohttp.ClientSession:
        if self._session is None:
            # No limit: the fleet knows how much an engine can take.
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=CLIENT_IDLE_SECONDS)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers, trust_env=False)
        return self._session

    async def _close_session(self) -> None:
        if self._session is not None:
            await self._session.close()


async def _read_response(url: str, response: aiohttp.ClientResponse) -> bytes:
    """Read a response to its end, up to a size that no engine of ours exceeds."""
    content = bytearray()
    async for part in response.content.iter_any():
        content += part
        if len(content) > _ANSWER_BYTES:
            raise EngineLost(f"{url} answers with more than {_ANSWER_BYTES} bytes; no engine of ours does")
    return bytes(content)


def _check_status(url: str, status: int, content: bytes) -> None:
    if status == HTTPStatus.OK:
        return
    reason = f"{url} answered {status}: {_refusal_reason(content)}"
    if status in {HTTPStatus.BAD_REQUEST, HTTPStatus.NOT_FOUND, HTTPStatus.UNPROCESSABLE_ENTITY}:
        raise RequestRefused(reason)
    if status == HTTPStatus.UNAUTHORIZED:
        raise RequestRefused(f"{reason}; the engine is another attempt's")
    raise EngineLost(reason)


def _refusal_reason(content: bytes) -> str:
    try:
        return str(json.loads(content)["error"])[:500]
    except (ValueError, KeyError, TypeError):
        return content[:500].decode(errors="replace").strip()
