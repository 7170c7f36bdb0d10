"""The port of probes and metrics, which asks for no key: no client keeps a probe out, nor takes more than its share."""

from __future__ import annotations

import asyncio
import gc
import tracemalloc
from collections.abc import Awaitable, Callable
from contextlib import suppress

import pytest

from moejob_operator.admission.listener import ListenerLimits
from moejob_operator.runtime import health
from moejob_operator.runtime.metrics import Metrics

HOST = "127.0.0.1"


def played(story: Callable[[int], Awaitable[None]], limits: ListenerLimits = health.LIMITS) -> None:
    async def play() -> None:
        answers = health.health_handler(Metrics(), dict, lambda: {"certificate": "there is none yet"})
        async with health.serve_health(answers, 0, HOST, limits) as port:
            await story(port)

    asyncio.run(play())


async def asked(port: int, path: str) -> bytes:
    reader, writer = await asyncio.open_connection(HOST, port)
    writer.write(f"GET {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    try:
        return await asyncio.wait_for(reader.read(), 60)
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("path", "says"),
    [
        pytest.param("/healthz", [b"HTTP/1.1 200", b"\r\nok\n"], id="alive"),
        pytest.param("/readyz", [b"HTTP/1.1 503", b"certificate: there is none yet\n"], id="not ready"),
        pytest.param("/metrics", [b"HTTP/1.1 200", b"text/plain; version=0.0.4", b"# HELP moejob_"], id="metrics"),
        pytest.param("/elsewhere", [b"HTTP/1.1 404"], id="nothing else"),
    ],
)
def test_each_path_has_its_answer(path: str, says: list[bytes]) -> None:
    async def story(port: int) -> None:
        answer = await asked(port, path)
        assert [piece for piece in says if piece not in answer] == []

    played(story)


def test_connections_that_say_nothing_give_way_to_a_probe() -> None:
    """A process has a thousand sockets, and the API server is asked over the same."""

    async def story(port: int) -> None:
        silent = [await asyncio.open_connection(HOST, port) for _ in range(3 * health.LIMITS.connections)]
        assert b" 200 " in await asked(port, "/healthz")
        for reader, _ in silent[: -health.LIMITS.connections]:
            with suppress(ConnectionError):
                assert await asyncio.wait_for(reader.read(), 60) == b""
        for _, writer in silent:
            writer.transport.abort()

    played(story)


ASKED = b"GET /healthz HTTP/1.1\r\nHost: x\r\n"
MUCH = 256 * 1024


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(ASKED + b"a: b\r\n" * (MUCH // 6), id="headers without end"),
        pytest.param(b"\xff" * MUCH, id="no request at all"),
        pytest.param(b"no request\r\n\r\n" + b"\xff" * MUCH, id="no request, and more"),
        pytest.param(ASKED + b"\r\n" + b"\xff" * MUCH, id="a request, and more"),
        pytest.param(ASKED + b"Transfer-Encoding: chunked\r\n\r\n" + b"\xff" * MUCH, id="a body of no known length"),
        pytest.param(ASKED + b"Content-Length: 4\r\n\r\n" + b"\xff" * MUCH, id="more than the body"),
    ],
)
def test_little_is_kept_of_what_is_no_request(sent: bytes) -> None:
    """The error of a parser holds what it was given, until the collector comes by, which in the operator is seldom."""

    async def story(port: int) -> None:
        async def send() -> None:
            with suppress(ConnectionError):
                reader, writer = await asyncio.open_connection(HOST, port)
                writer.write(sent)
                await reader.read()
                writer.transport.abort()

        for _ in range(20):
            await asyncio.wait_for(send(), 60)
        assert b" 200 " in await asked(port, "/healthz")

    gc.collect()
    gc.disable()
    tracemalloc.start()
    try:
        played(story)
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
        gc.enable()
    assert kept < 20 * MUCH / 4


def test_a_request_whose_body_comes_in_pieces_and_another_after_it_are_answered() -> None:
    async def story(port: int) -> None:
        reader, writer = await asyncio.open_connection(HOST, port)
        for _ in range(2):
            for piece in (ASKED[:20], ASKED[20:], b"content-length: 4\r\n\r", b"\nab", b"cd"):
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(0)
            answer = await asyncio.wait_for(reader.readuntil(b"ok\n"), 60)
            assert b" 200 " in answer
        writer.close()

    played(story)


@pytest.mark.parametrize("sent", [b"", b"GET /metrics HTTP/1.1\r\nX-Slow: "])
def test_a_connection_without_a_whole_request_is_closed(sent: bytes) -> None:
    async def story(port: int) -> None:
        reader, writer = await asyncio.open_connection(HOST, port)
        writer.write(sent)
        with suppress(ConnectionError):
            assert await asyncio.wait_for(reader.read(), 60) == b""
        writer.close()

    played(story, ListenerLimits(idle_seconds=0.2))
