"""Attacks on listeners, and an honest client beside: all from another process than the one that is attacked."""

from __future__ import annotations

import asyncio
import json
import random
import ssl
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from benchmarks.hostile.reviews import Drawn, job, request
from fuzzing import damage_sample
from moejob_operator.admission.review import PATH
from moejob_operator.admission.server import BODY_BYTES

HOST = "127.0.0.1"
_CLIENTS = 32
# Connections of one client: 320 together.
_AT_ONCE = 10
# A job with all that it may say has some kilobytes.
_USUAL_BYTES = 8192
_FAILURES = (OSError, asyncio.IncompleteReadError, TimeoutError)


Pair = tuple[asyncio.StreamReader, asyncio.StreamWriter]


@dataclass
class Target:
    """The listener under attack."""

    port: int
    trust: ssl.SSLContext | None = None
    name: str | None = None
    # Seconds that an honest client waited for each of its answers.
    honest: list[float] = field(default_factory=list)

    async def open_connection(self) -> Pair:
        """Open a connection, over TLS where the listener speaks it."""
        return await asyncio.open_connection(HOST, self.port, ssl=self.trust, server_hostname=self.name)


Attack = Callable[[Target, random.Random], Awaitable[None]]


async def attack_target(target: Target, attack: Attack, honest: bytes | None, seconds: float) -> None:
    """Attack with many clients at once, while an honest one asks again and again, unless another process does."""
    clients = [asyncio.create_task(_repeat_attack(attack, target, random.Random(number))) for number in range(_CLIENTS)]
    if honest is not None:
        clients.append(asyncio.create_task(_ask(target, honest)))
    await asyncio.sleep(seconds)
    for client in clients:
        client.cancel()
    await asyncio.wait(clients)


async def _repeat_attack(attack: Attack, target: Target, draw: random.Random) -> None:
    while True:
        with suppress(*_FAILURES):
            await attack(target, draw)
        # One that is refused at once may not keep this process from asking honestly.
        await asyncio.sleep(0.002)


async def _ask(target: Target, sent: bytes) -> None:
    await asyncio.sleep(0.5)
    while True:
        started = time.perf_counter()
        try:
            # One that was cut off is asked again.
            while b" 200 " not in (await _answer_or_none(target, sent))[:20]:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        finally:
            # The last is cut off by the end of the attack.
            target.honest.append(time.perf_counter() - started)
        await asyncio.sleep(0.05)


async def _answer_or_none(target: Target, sent: bytes) -> bytes:
    with suppress(*_FAILURES):
        return await ask_once(target, sent)
    return b""


async def ask_once(target: Target, sent: bytes) -> bytes:
    """Ask once on a connection of its own, and wait for the whole answer."""
    reader, writer = await target.open_connection()
    try:
        writer.write(sent)
        await writer.drain()
        return await reader.read()
    finally:
        writer.transport.abort()


def review_request(body: bytes, length: int | None = None) -> bytes:
    """Return a review as HTTP."""
    head = f"POST {PATH} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {length or len(body)}\r\n\r\n"
    return head.encode() + body


def got(path: str) -> bytes:
    """Return a request for a path."""
    return f"GET {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n\r\n".encode()


def body_of_a_stranger(path: str) -> bytes:
    """Return the head of a large body that shows no key."""
    return f"POST {path} HTTP/1.1\r\nHost: a\r\nContent-Length: {1 << 30}\r\n\r\n".encode()


# --- on the webhook ---------------------------------------------------------------------------------------------------


def worst(reviews: Sequence[Drawn]) -> Attack:
    """Send the reviews that take longest, one after another."""
    bodies = [review_request(json.dumps(request(genes)).encode()) for genes in reviews]

    async def attack(target: Target, draw: random.Random) -> None:
        await ask_once(target, draw.choice(bodies))

    return attack


def dense(values: int, old: str) -> Attack:
    """Send bodies of as many empty lists as are read, the rest blanks."""
    spec = json.dumps({"spec": [[]] * (values // 2)})
    review = request({("method",): "SFT"})["request"]
    body = json.dumps({"request": review | {"object": 0, "oldObject": 1}}).encode()
    body = body.replace(b'"object": 0', b'"object": ' + spec.encode())
    body = body.replace(b'"oldObject": 1', b'"oldObject": ' + old.encode())
    sent = review_request(body + b" " * (BODY_BYTES - len(body)))

    async def attack(target: Target, _: random.Random) -> None:
        await ask_once(target, sent)

    return attack


async def send_unfinished(target: Target, _: random.Random) -> None:
    """Send all of a large body but its last byte."""
    reader, writer = await target.open_connection()
    try:
        writer.write(review_request(b" " * (BODY_BYTES - 1), BODY_BYTES))
        await reader.read()
    finally:
        writer.transport.abort()


async def send_small_unfinished(target: Target, _: random.Random) -> None:
    """Send the heads of many reviews of the usual size, and a byte of each body."""
    await _many(target.open_connection, review_request(b"{", _USUAL_BYTES))


# --- on any -----------------------------------------------------------------------------------------------------------


async def silent(target: Target, _: random.Random) -> None:
    """Open connections that say nothing, in plain TCP."""
    await _many(lambda: asyncio.open_connection(HOST, target.port), b"")


async def _many(connect: Callable[[], Awaitable[Pair]], sent: bytes) -> None:
    writers = list[asyncio.StreamWriter]()
    try:
        while len(writers) < _AT_ONCE:
            writers.append((await connect())[1])
            writers[-1].write(sent)
        await asyncio.sleep(1)
    finally:
        for writer in writers:
            writer.transport.abort()


def damaged_requests(samples: Sequence[bytes]) -> Attack:
    """Send requests with a few places changed."""

    async def attack(target: Target, draw: random.Random) -> None:
        reader, writer = await target.open_connection()
        try:
            writer.write(damage_sample(draw, samples))
            async with asyncio.timeout(0.2):
                await reader.read(65_536)
        finally:
            writer.transport.abort()

    return attack


def without_end(head: bytes, more: bytes, seconds: float) -> Attack:
    """Send a head and then the same bytes for as long as they are taken, or slowly."""

    async def attack(target: Target, _: random.Random) -> None:
        reader, writer = await target.open_connection()
        try:
            writer.write(head)
            while not reader.at_eof():
                writer.write(more)
                async with asyncio.timeout(5):
                    await writer.drain()
                await asyncio.sleep(seconds)
        finally:
            writer.transport.abort()

    return attack


# --- on the operator that asks pods -----------------------------------------------------------------------------------


Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


def pods_that_say(head: bytes, more: bytes, seconds: float) -> Answer:
    """Answer the operator with a head and then the same bytes without end."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(*_FAILURES):
            writer.write(head)
            while not writer.is_closing():
                writer.write(more)
                await writer.drain()
                await asyncio.sleep(seconds)
        writer.transport.abort()

    return answer


def honest_review() -> bytes:
    """Return a review of a job that can work."""
    genes: Drawn = {
        ("method",): "SFT",
        ("model", "source"): "Qwen/Qwen3-30B-A3B",
        ("parallelism", "tensor"): 4,
        ("parallelism", "expert"): 4,
        ("training", "globalBatchSize"): 64,
        ("resources", "gpuType"): "H100",
        ("storage", "accessModes"): ["ReadWriteMany"],
    }
    review = request(genes)
    review["request"] |= {"operation": "CREATE", "oldObject": None, "object": job(genes)}
    return review_request(json.dumps(review).encode())
