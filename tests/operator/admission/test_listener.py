"""The bytes of a connection that an HTTP parser is given, wherever they are cut, and what is logged of them."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import Callable
from contextlib import suppress

import pytest
from aiohttp import web

from connections import SentConnection
from moejob_operator.admission.listener import BoundedServer, ListenerLimits, RequestIntake, open_listener
from moejob_operator.runtime.event_loop import EventLoop

# Only failures take it.
DEADLINE_SECONDS = 120.0
# Closing such a socket resets its connection.
RESET = struct.pack("ii", 1, 0)
GET = b"GET / HTTP/1.1\r\nHost: a\r\n\r\n"
POST = b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n"


def taken(data: bytes, size: int) -> bool:
    """Return whether all of it is taken, in pieces of this size."""
    intake = RequestIntake()
    return all(intake.take_bytes(data[start : start + size]) for start in range(0, len(data), size))


@pytest.mark.parametrize("size", [1, 2, 3, 7, 40, 100_000])
@pytest.mark.parametrize(
    ("data", "is_taken"),
    [
        pytest.param(GET, True, id="a head"),
        pytest.param(GET[:-2], True, id="a part of a head"),
        pytest.param(POST + b"12345", True, id="a body"),
        pytest.param(POST + b"123", True, id="a part of a body"),
        pytest.param(POST + b"123456", False, id="more than the body"),
        pytest.param(GET + b"1", False, id="more than a head"),
        pytest.param(GET + GET, False, id="another request before the answer"),
        pytest.param(b"\r\n\r\n" + GET, False, id="an empty head"),
        pytest.param(GET[:-2] + b"a: " + b"b" * 16_384, False, id="a head that is too long"),
        pytest.param(POST.replace(b"5", b"9" * 11) + b"1", False, id="a length beyond all sense"),
    ],
)
def test_one_request_is_taken_and_nothing_beside_it(data: bytes, is_taken: bool, size: int) -> None:
    assert taken(data, size) is is_taken


@pytest.mark.parametrize(
    ("data", "awaits_body"),
    [(b"", False), (GET[:-2], False), (GET, False), (POST, True), (POST + b"1234", True), (POST + b"12345", False)],
)
def test_it_is_known_whether_a_body_is_there(data: bytes, awaits_body: bool) -> None:
    intake = RequestIntake()
    assert intake.take_bytes(data)
    assert intake.is_awaiting_body is awaits_body


@pytest.mark.parametrize("read", [0, 3, 5])
def test_the_next_request_is_taken_behind_a_body_that_was_answered_early(read: int) -> None:
    intake = RequestIntake()
    assert intake.take_bytes(POST + b"12345"[:read])
    intake.expect_next_request()
    assert intake.take_bytes(b"12345"[read:])
    assert intake.take_bytes(GET)
    assert not intake.take_bytes(GET)


def test_what_is_wrong_with_us_is_logged_and_what_a_client_did_is_not(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(_: web.BaseRequest) -> web.StreamResponse:
        raise ZeroDivisionError

    async def story() -> None:
        server = BoundedServer(broken, ListenerLimits())
        for sent in (b"GET HTTP\r\n\r\n", GET):
            protocol = server()
            protocol.connection_made(SentConnection())
            protocol.data_received(sent)
            for _ in range(4):
                await asyncio.sleep(0)
            protocol.connection_lost(None)

    asyncio.run(story())
    assert [record.exc_info and record.exc_info[0] for record in caplog.records] == [ZeroDivisionError]


@pytest.mark.parametrize("loop", [EventLoop, asyncio.new_event_loop], ids=["the operator's loop", "asyncio's"])
def test_connections_that_are_reset_at_once_make_no_room_that_there_is_not(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    async def answered(_: web.BaseRequest) -> web.StreamResponse:
        return web.Response()

    async def story() -> None:
        limits = ListenerLimits(connections=2, idle_seconds=10 * DEADLINE_SECONDS)
        async with open_listener(BoundedServer(answered, limits), "127.0.0.1", 0) as port:
            for _ in range(20):
                with socket.create_connection(("127.0.0.1", port)) as one:
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
            # Each of these says nothing: the third has no room until the first gives way.
            silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(3)]
            async with asyncio.timeout(DEADLINE_SECONDS):
                with suppress(ConnectionError):
                    assert await silent[0][0].read() == b""
            for _, writer in silent:
                writer.close()

    with asyncio.Runner(loop_factory=loop) as runner:
        runner.run(story())
