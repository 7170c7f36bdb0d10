"""A descriptor has one owner, whatever becomes of its connection: closed twice, it is another connection's."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import socket
import ssl
import struct
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from moejob_operator import __main__ as program
from moejob_operator.runtime.event_loop import EventLoop

# Only failures take it.
DEADLINE_SECONDS = 120.0
RESET = struct.pack("ii", 1, 0)


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def within_deadline() -> None:
        await asyncio.wait_for(main(), DEADLINE_SECONDS)

    with asyncio.Runner(loop_factory=EventLoop) as runner:
        runner.run(within_deadline())


def connected() -> tuple[socket.socket, socket.socket]:
    """A client's end of a connection over TCP, and the server's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        client = socket.create_connection(server.getsockname())
        return client, server.accept()[0]


def connected_and_reset() -> socket.socket:
    """A client's end of a connection that its server has reset."""
    client, server = connected()
    server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
    server.close()
    assert select.select([client], [], [], DEADLINE_SECONDS)[0], "the reset has arrived"
    return client


def is_open(number: int) -> bool:
    return Path(f"/proc/self/fd/{number}").exists()


def test_a_connection_that_is_reset_before_tls_begins_takes_no_other_with_it() -> None:
    held = [connected_and_reset()]
    number = held[0].fileno()

    async def main() -> None:
        with pytest.raises(ConnectionError):
            await asyncio.get_running_loop().create_connection(
                asyncio.Protocol, sock=held[0], ssl=ssl.create_default_context(), server_hostname="api"
            )

    with Path(os.devnull).open() as another:
        run(main)
        assert not is_open(number)
        os.dup2(another.fileno(), number)
    held.clear()
    gc.collect()
    assert is_open(number), "it is another's now"
    os.close(number)


def test_a_socket_that_is_given_to_the_loop_is_open_until_its_transport_is_closed() -> None:
    async def main() -> None:
        client, server = connected()
        number, lost = client.fileno(), asyncio.Event()

        class Connection(asyncio.Protocol):
            def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002  # the base class's
                lost.set()

        transport, _ = await asyncio.get_running_loop().create_connection(Connection, sock=client)
        with server:
            server.settimeout(DEADLINE_SECONDS)
            transport.write(b"asked")
            assert server.recv(5) == b"asked"
            assert is_open(number)
            transport.close()
            await lost.wait()
            assert server.recv(5) == b"", "the end of the connection"
        assert not is_open(number)

    run(main)


def test_the_operator_runs_on_this_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    loops: list[asyncio.AbstractEventLoop] = []

    async def seen(_: object) -> int:
        loops.append(asyncio.get_running_loop())
        return 3

    monkeypatch.setattr(program, "read_settings", lambda _: Mock())
    monkeypatch.setattr(program, "logs", Mock())
    monkeypatch.setattr(program, "process", Mock(run_operator=seen))
    assert program.main() == 3
    assert isinstance(loops[0], EventLoop)
