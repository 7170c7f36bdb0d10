"""Pods are asked how they are, and not believed: whatever one answers costs little, and yields only progress."""

from __future__ import annotations

import asyncio
import json
import resource
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest
from aiohttp import web

from moejob_api.contract.pods import MOST_MEASURES, PodProgress
from moejob_api.job.base import MOST_RANKS_OF_A_POD
from moejob_api.job.status import MOST_HUB_COMMITS
from moejob_operator.kube_api.pod_client import HEAD_BYTES, PROGRESS_BYTES, MutePod, PodClient, parse_progress

PROGRESS = json.dumps({"attempt": 2, "index": 0, "ready": True})
UNKNOWN_FIELDS = '{"a":1,"b":2,"c":3}'
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


@pytest.mark.parametrize(
    "values",
    [
        pytest.param(f'"ranks":[{",".join(["{}"] * 20_000)}]', id="empty ranks"),
        pytest.param(f'"run":{{"step":1,"hubCommits":[{",".join(["{}"] * 20_000)}]}}', id="empty commits"),
        pytest.param(f'"ranks":[{",".join([UNKNOWN_FIELDS] * 3_000)}]', id="unknown fields"),
        pytest.param(",".join(f'"x{number}":1' for number in range(3_000)), id="just few enough to be looked at"),
    ],
)
def test_hostile_answers_of_many_pods_leave_the_loop_to_others(values: str) -> None:
    """The Lease is renewed in the same loop. A hundred such bodies took it for 7 s, parsed one after the other."""

    async def story() -> None:
        worst, ended = 0.0, False

        async def renew() -> None:
            nonlocal worst
            while not ended:
                start = time.thread_time()
                await asyncio.sleep(0)
                worst = max(worst, time.thread_time() - start)

        renewal = asyncio.create_task(renew())
        async with pod(says(OK, f'{{"attempt":1,"index":0,{values}}}'.encode())) as client:
            patient = PodClient(30.0, client.port)
            answers = (patient.get_progress("127.0.0.1") for _ in range(100))
            replies = await asyncio.gather(*answers, return_exceptions=True)
        ended = True
        await renewal
        assert worst < 0.3
        assert {type(reply) for reply in replies} == {MutePod}
        assert all(len(str(reply)) < 100 for reply in replies)

    asyncio.run(story())


def test_the_reading_of_an_answer_counts_as_the_time_of_its_pod() -> None:
    async def story() -> None:
        async with pod(says(OK, PROGRESS.encode())) as client:
            async with client.parsing:
                with pytest.raises(MutePod, match="TimeoutError"):
                    await client.get_progress("127.0.0.1")
            assert await client.get_progress("127.0.0.1") == READY

    asyncio.run(story())


def test_a_full_pod_with_all_that_it_may_say_is_understood() -> None:
    commit = {"kind": "model", "name": "team/tiny", "commit": "a" * 40}
    run = {
        "step": 1,
        "measures": {f"reward of {number}, [weighted]": 1.0 for number in range(MOST_MEASURES)},
        "hubCommits": [commit] * MOST_HUB_COMMITS,
    }
    ranks = [{"rank": rank, "pid": 7, "step": 1, "ageSeconds": 0.5} for rank in range(MOST_RANKS_OF_A_POD)]
    progress = {"attempt": 1, "index": 0, "ranks": ranks, "run": run}
    assert len(parse_progress(json.dumps(progress).encode()).ranks) == MOST_RANKS_OF_A_POD
    with pytest.raises(MutePod, match="1 errors"):
        parse_progress(json.dumps({**progress, "ranks": [*ranks, ranks[0]]}).encode())


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
