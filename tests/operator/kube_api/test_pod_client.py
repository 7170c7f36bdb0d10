"""Pods are asked how they are, and not believed: whatever one answers costs little, and yields only progress."""

from __future__ import annotations

import asyncio
import json
import resource
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from moejob_api.contract.pods import PodProgress
from moejob_operator.kube_api.pod_client import HEAD_BYTES, PROGRESS_BYTES, MutePod, PodClient, parse_progress

PROGRESS = json.dumps({"attempt": 2, "index": 0, "ready": True})
READY = PodProgress(attempt=2, index=0, ready=True)
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def head(*lines: str) -> bytes:
    return "".join(f"{line}\r\n" for line in (*lines, "")).encode()


OK = head("HTTP/1.1 200 OK", "Content-Type: application/json")


@asynccontextmanager
async def pod(serve: Serve) -> AsyncIterator[PodClient]:
    """A pod on loopback that does with a connection what it likes."""
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    try:
        yield PodClient(0.5, server.sockets[0].getsockname()[1])
    finally:
        server.close()


async def asked(serve: Serve) -> PodProgress | None:
    async with pod(serve) as client:
        try:
            return await client.get_progress("127.0.0.1")
        except MutePod:
            return None


def says(*pieces: bytes) -> Serve:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        for piece in pieces:
            writer.write(piece)
        writer.close()

    return serve


def forever(piece: bytes, *, pause: float = 0.0) -> Serve:
    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while not writer.is_closing():
                writer.write(piece)
                await writer.drain()
                await asyncio.sleep(pause)
        except OSError:
            return

    return serve


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        pytest.param(says(OK, PROGRESS.encode()), READY, id="what it says"),
        pytest.param(says(head("HTTP/1.1 503 Busy"), PROGRESS.encode()), None, id="not ready to say anything"),
        pytest.param(says(head("HTTP/1.1 302 Found", "Location: /elsewhere")), None, id="sent elsewhere"),
        pytest.param(says(OK, b"{"), None, id="no JSON"),
        pytest.param(says(OK, b"\xff"), None, id="no text"),
        pytest.param(says(OK, b'{"attempt": -1, "index": 0}'), None, id="no progress"),
        pytest.param(says(OK, b"[" * 50_000), None, id="nested without end"),
        pytest.param(says(OK, PROGRESS.encode(), b" " * PROGRESS_BYTES), None, id="too long"),
        pytest.param(says(OK[:-2], b"X-Large: " + b"x" * HEAD_BYTES + b"\r\n\r\n"), None, id="a head that is too long"),
        pytest.param(says(b"SSH-2.0-OpenSSH\r\n\r\n"), None, id="another protocol"),
        pytest.param(says(), None, id="nothing"),
        pytest.param(forever(b" ", pause=0.05), None, id="too slow"),
        pytest.param(
            forever(b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"), None, id="interim answers without end"
        ),
        pytest.param(forever(b"X-Header: value\r\n"), None, id="headers without end"),
    ],
)
def test_a_pod_is_asked_and_not_believed(answer: Serve, expected: PodProgress | None) -> None:
    assert asyncio.run(asked(answer)) == expected


@pytest.mark.parametrize("piece", [b"HTTP/1.1 103 Early Hints\r\n\r\n" * 1000, b"X-Header: value\r\n" * 1000])
def test_a_flood_of_interim_answers_or_headers_neither_stops_the_loop_nor_fills_the_memory(piece: bytes) -> None:
    async def story() -> None:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        async with pod(forever(piece)) as client:
            with pytest.raises(MutePod):
                await client.get_progress("127.0.0.1")
        grown_kib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
        assert grown_kib < 20 * 1024

    asyncio.run(story())


def test_an_http_server_of_today_is_understood() -> None:
    """It would answer HTTP/1.1 in chunks, and keep the connection."""

    async def story() -> None:
        async def progress(_: web.Request) -> web.StreamResponse:
            return web.Response(text=PROGRESS)

        app = web.Application()
        app.add_routes([web.get("/progress", progress)])
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        assert await PodClient(5.0, runner.addresses[0][1]).get_progress("127.0.0.1") == READY
        await runner.cleanup()

    asyncio.run(story())


def test_a_pod_where_nothing_listens_is_mute() -> None:
    async def story() -> None:
        async with pod(says()) as client:
            pass
        for address in ("127.0.0.1", "::1"):
            with pytest.raises(MutePod):
                await client.get_progress(address)

    asyncio.run(story())


# --- what is read ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", ["9" * 5000, "1" + "0" * 400, str(2**53 + 1), str(-(2**63))])
def test_a_huge_integer_is_no_progress(number: str) -> None:
    with pytest.raises(MutePod):
        parse_progress(PROGRESS.replace("2", number).encode())


def test_text_of_a_pod_cannot_write_on_a_terminal() -> None:
    fault = {"outcome": "RankFailed", "message": "\x1b[2Jall is well\x07\u202egpj.exe \nsecond line"}
    found = parse_progress(json.dumps({"attempt": 1, "index": 0, "fault": fault}).encode())
    assert found.fault is not None
    assert found.fault.message == " [2Jall is well  gpj.exe  second line"
