"""The pod's HTTP server, which asks for no key: no client keeps others out, nor takes more than its share."""

from __future__ import annotations

import io
import socket
import threading
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from urllib.request import urlopen

import pytest

from connections import is_over
from fuzzing import random_sources
from moejob_api.contract.pods import PodProgress
from moejob_trainer.launcher.http_server import CONNECTIONS, REQUEST_BYTES, ProgressServer, _ProgressHandler
from trainer.launcher.launchers import await_result

READY = PodProgress(attempt=1, index=0, ready=True)
HOST = "127.0.0.1"
# Longer than any client of these tests takes.
LONG_SECONDS = 600.0


@pytest.fixture
def server() -> Iterator[ProgressServer]:
    server = ProgressServer(HOST, 0, lambda: READY, LONG_SECONDS)
    yield server
    server.close()


def is_ready(server: ProgressServer) -> bool:
    with urlopen(f"http://{HOST}:{server.port}/ready", timeout=60) as answer:
        return bool(answer.status == 200)


def connected(server: ProgressServer) -> socket.socket:
    return socket.create_connection((HOST, server.port), timeout=60)


def test_connections_that_say_nothing_give_way_and_are_bounded(server: ProgressServer) -> None:
    before = threading.active_count()
    with ExitStack() as opened:
        silent = [opened.enter_context(connected(server)) for _ in range(3 * CONNECTIONS)]
        assert is_ready(server)
        # The oldest were hung up on, the newest were not.
        assert silent[0].recv(1) == b""
        silent[-1].sendall(b"GET /ready HTTP/1.0\r\n\r\n")
        assert silent[-1].recv(12) == b"HTTP/1.0 200"
        await_result(lambda: threading.active_count() - before <= CONNECTIONS, "the end of their threads")


def test_a_request_that_never_ends_is_hung_up_on_when_its_time_is_over() -> None:
    server = ProgressServer(HOST, 0, lambda: READY, seconds=0.5)

    with connected(server) as client:
        client.sendall(b"GET /progress HTTP/1.0\r\n")
        client.settimeout(0.05)
        await_result(lambda: is_over(client), "the server to hang up")
    assert is_ready(server)
    server.close()


def test_headers_without_end_are_not_read_to_their_end(server: ProgressServer) -> None:
    with connected(server) as client:
        with suppress(OSError):
            client.sendall(b"GET /ready HTTP/1.0\r\n" + b"a: b\r\n" * REQUEST_BYTES)
        assert is_ready(server)
        with suppress(ConnectionResetError):
            assert client.recv(9) in (b"HTTP/1.0 ", b"")


class _Connection:
    """A socket of which both directions lie in memory."""

    def __init__(self, sent: bytes) -> None:
        self.sent, self.answer = io.BytesIO(sent), b""

    def makefile(self, *_: object) -> io.BytesIO:
        return self.sent

    def sendall(self, content: bytes) -> None:
        self.answer += bytes(content)

    def settimeout(self, _: object) -> None:
        pass


class _Handler(_ProgressHandler):
    pod = staticmethod(lambda: READY)


WORDS = (
    *(b"GET /progress HTTP/1.0\r\n", b"GET", b"POST", b" ", b"/progress", b"/ready?x", b"/metrics", b"HTTP/1.1"),
    *(b"HTTP/9999999", b"\r\n", b"\n", b"Content-Length: -1", b"Expect: 100-continue", b"Connection: keep-alive"),
    *(b": ", b"\0", b"\xff", b"%00"),
)


def test_no_request_does_more_than_be_answered() -> None:
    """Whatever nearly makes a request gets one answer or none, and raises nothing."""
    sent = answered = 0
    for draw in random_sources():
        parts = (draw.choice(WORDS) if draw.random() < 0.9 else draw.randbytes(3) for _ in range(draw.randrange(1, 12)))
        connection = _Connection(b"".join(parts) * draw.choice((1, 1, 1, 2000)))
        _Handler(connection, (HOST, 1), None)  # type: ignore[arg-type]
        # It may repeat a request line, each letter of which can be an entity of HTML.
        assert len(connection.answer) < 8 * REQUEST_BYTES
        assert connection.sent.closed
        sent, answered = sent + 1, answered + (b"200 OK" in connection.answer)
    assert 0 < answered < sent
