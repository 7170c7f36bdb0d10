"""The port of an engine: strangers find a bounded place there, and none of it is the trainer's."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from typing import Any

import pytest
from uvicorn.server import ServerState

from connections import SentConnection, is_over
from fuzzing import damage_sample, random_sources
from moejob_api.contract.pods import HttpPath
from moejob_rollout.listener import HEAD_BYTES, StrangerLimits
from rollout.served import HOST, KEY, EngineServer, served

READY = f"GET {HttpPath.READY} HTTP/1.1\r\nHost: a\r\n\r\n".encode()
# Longer than any client of these tests takes.
LIMITS = StrangerLimits(connections=16, seconds=600.0)


@pytest.fixture
def server() -> Iterator[EngineServer]:
    with served(LIMITS) as server:
        yield server


def connected(server: EngineServer) -> socket.socket:
    return socket.create_connection((HOST, server.port), timeout=60)


def post(body: int, *headers: bytes) -> bytes:
    return b"POST /count HTTP/1.1\r\nHost: a\r\nContent-Length: %d\r\n" % body + b"".join(headers) + b"\r\n"


def asked(server: EngineServer, sent: bytes) -> bytes:
    """Everything that is answered until the connection is closed."""
    with connected(server) as client:
        client.sendall(sent)
        return rest(client)


def rest(client: socket.socket) -> bytes:
    found = b""
    with suppress(ConnectionResetError):
        while part := client.recv(65_536):
            found += part
    return found


def eventually(is_so: Callable[[], bool], what: str) -> None:
    until = time.monotonic() + 120
    while not is_so():
        assert time.monotonic() < until, what
        time.sleep(0.005)


def test_connections_that_say_nothing_give_way_and_are_bounded(server: EngineServer) -> None:
    with ExitStack() as opened:
        silent = [opened.enter_context(connected(server)) for _ in range(3 * LIMITS.connections)]
        assert asked(server, post(0, KEY, b"Connection: close\r\n")).startswith(b"HTTP/1.1 200")
        # The oldest were hung up on, the newest were not.
        assert rest(silent[0]) == b""
        eventually(lambda: server.connections <= LIMITS.connections, f"{server.connections} are open")
        silent[-1].sendall(post(0, KEY))
        assert silent[-1].recv(12) == b"HTTP/1.1 200"


def test_a_client_with_the_key_waits_for_its_answer_whoever_else_comes(server: EngineServer) -> None:
    with ExitStack() as opened:
        trainers = list[socket.socket]()
        while len(trainers) < 2 * LIMITS.connections:
            trainers.append(opened.enter_context(connected(server)))
            trainers[-1].sendall(b"GET /hold HTTP/1.1\r\nHost: a\r\n" + KEY + b"\r\n")
            eventually(lambda: len(server.bodies) == len(trainers), "a request is not served")
        for _ in range(3 * LIMITS.connections):
            opened.enter_context(connected(server))
        server.may_go.set()
        assert {trainer.recv(12) for trainer in trainers} == {b"HTTP/1.1 200"}


@pytest.mark.parametrize(
    "begun",
    [
        pytest.param(b"", id="nothing"),
        pytest.param(b"GET /ready HTTP/1.1\r\na: ", id="a head"),
        pytest.param(post(10**6, b"Expect: 100-continue\r\n"), id="a body that nothing asks for"),
    ],
)
def test_a_byte_now_and_then_keeps_no_connection_open(begun: bytes) -> None:
    with served(StrangerLimits(seconds=0.5)) as server, connected(server) as client:
        client.sendall(begun)
        client.settimeout(0.05)
        eventually(lambda: is_over(client), "the server does not hang up")


def test_headers_without_end_are_not_read_to_their_end(server: EngineServer) -> None:
    with connected(server) as client:
        client.sendall(b"GET /ready HTTP/1.1\r\n" + b"a: b\r\n" * HEAD_BYTES)
        assert rest(client) == b""


def test_a_body_without_the_key_is_not_read(server: EngineServer) -> None:
    with connected(server) as client:
        client.sendall(post(10**9))
        assert rest(client).startswith(b"HTTP/1.1 401")
    assert server.bodies == []


def test_a_body_with_the_key_has_no_bound(server: EngineServer) -> None:
    size = 8 * 1024**2
    answer = asked(server, post(size, KEY, b"Connection: close\r\n") + b"a" * size)
    assert answer.startswith(b"HTTP/1.1 200")
    assert server.bodies == [size]


def test_a_stranger_gets_one_answer_on_a_connection(server: EngineServer) -> None:
    assert asked(server, 100 * READY).count(b"HTTP/1.1") == 1
    assert asked(server, 100 * post(0)).count(b"HTTP/1.1") == 1


def test_an_error_of_the_server_says_that_it_ends_the_connection(server: EngineServer) -> None:
    with connected(server) as client:
        client.sendall(b"GET /fail HTTP/1.1\r\nHost: a\r\n" + KEY + b"\r\n")
        answer = rest(client)
    assert answer.startswith(b"HTTP/1.1 500")
    assert b"\r\nconnection: close\r\n" in answer


# --- the first token --------------------------------------------------------------------------------------------------


def is_ready(server: EngineServer) -> bool:
    return asked(server, READY).startswith(b"HTTP/1.1 200")


def test_callers_of_ready_share_one_generation(server: EngineServer) -> None:
    eventually(lambda: server.client.asked > 0, "nothing is generated before the first asks")
    assert not any(is_ready(server) for _ in range(50))
    # The reply to a stranger and the error of a server both end the connection.
    assert asked(server, READY).count(b"connection: close") == 1
    server.client.may_answer.set()
    eventually(lambda: is_ready(server), "it is not ready with its first token")
    assert server.client.asked == 1


def test_a_dead_engine_is_not_ready(server: EngineServer) -> None:
    server.client.may_answer.set()
    eventually(lambda: is_ready(server), "it is not ready with its first token")
    server.client.errored = True
    assert not is_ready(server)


# --- strange bytes ----------------------------------------------------------------------------------------------------


def test_the_port_answers_whatever_it_is_sent(caplog: pytest.LogCaptureFixture) -> None:
    server = EngineServer(StrangerLimits())
    server.client.may_answer.set()
    chunks = post(0).replace(b"Content-Length: 0", b"Transfer-Encoding: chunked")
    requests = [READY, post(3, KEY) + b"abc", READY + READY, chunks + b"3\r\nabc\r\n0\r\n\r\n"]

    async def story() -> None:
        config, state = server.config, ServerState()
        config.load()
        answers, complaints = 0, list[Mapping[str, Any]]()
        asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(context))
        for draw in random_sources():
            connection = SentConnection()
            protocol = config.http_protocol_class(config=config, server_state=state, app_state={})  # type: ignore[call-arg]
            protocol.connection_made(connection)
            # No socket hands on nothing.
            protocol.data_received(damage_sample(draw, requests) or b"\0")
            protocol.eof_received()
            for _ in range(4):
                # Its task begins; it reads no more than there is.
                await asyncio.sleep(0)
            protocol.connection_lost(None)
            assert connection.answer[:5] in (b"", b"HTTP/")
            answers += bool(connection.answer)
        await asyncio.sleep(0)
        assert (complaints, state.connections) == ([], set())
        assert answers > 0

    asyncio.run(story())
    assert [record for record in caplog.records if record.name.startswith("uvicorn")] == []
