"""Connections between the launchers of one attempt, open only to a peer that knows the attempt's secret.

The server sends a nonce S, the client answers with a nonce C and HMAC(key, "client" S C), the server with
HMAC(key, "server" C S). Neither the secret nor anything that can be replayed is ever sent, and key is derived from
secret, job and attempt, so a launcher of an older attempt is a stranger too. What follows is not encrypted: this keeps
out those who can connect, not one who can rewrite packets between two pods.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import socket
from collections.abc import Coroutine
from contextlib import suppress
from threading import Thread
from typing import Any

# No message of a launcher comes near it; what a length prefix says is not allocated unread.
FRAME_BYTES = 1 << 18
# Connections that wait to be accepted: all launchers of a gang may come at once.
BACKLOG = 1024
_NONCE_BYTES = 32
_PREFIX_BYTES = 4
_SPLICE_BYTES = 1 << 16


class Stranger(Exception):
    """The peer does not know the secret of this attempt."""


def attempt_key(secret: str, uid: str, attempt: int) -> bytes:
    """Return the key that the launchers of one attempt of a job share."""
    return hmac.digest(secret.encode(), f"moejob launchers\0{uid}\0{attempt}".encode(), hashlib.sha256)


async def admit(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> None:
    """Make a client prove that it knows the key, then prove it too; Stranger when it does not."""
    ours = os.urandom(_NONCE_BYTES)
    writer.write(ours)
    theirs = await reader.readexactly(_NONCE_BYTES)
    proof = await reader.readexactly(hashlib.sha256().digest_size)
    if not hmac.compare_digest(proof, _proof(key, b"client", ours + theirs)):
        raise Stranger("the client does not know the secret of this attempt")
    writer.write(_proof(key, b"server", theirs + ours))
    await writer.drain()


async def introduce(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> None:
    """Prove to a server that this client knows the key; Stranger when the server does not know it."""
    theirs, ours = await reader.readexactly(_NONCE_BYTES), os.urandom(_NONCE_BYTES)
    writer.write(ours + _proof(key, b"client", theirs + ours))
    proof = await reader.readexactly(hashlib.sha256().digest_size)
    if not hmac.compare_digest(proof, _proof(key, b"server", ours + theirs)):
        raise Stranger("the server does not know the secret of this attempt")


async def read_frame(reader: asyncio.StreamReader) -> bytes:
    """Return the next frame; ValueError when it is longer than any frame of a launcher."""
    length = int.from_bytes(await reader.readexactly(_PREFIX_BYTES), "big")
    if length > FRAME_BYTES:
        raise ValueError(f"a frame of {length} bytes is longer than {FRAME_BYTES}")
    return await reader.readexactly(length)


async def write_frame(writer: asyncio.StreamWriter, content: bytes) -> None:
    """Send one frame."""
    writer.write(len(content).to_bytes(_PREFIX_BYTES, "big") + content)
    await writer.drain()


Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


async def splice(one: Streams, other: Streams) -> None:
    """Carry bytes both ways until either side ends, then close both."""
    ways = [asyncio.ensure_future(_carry(one[0], other[1])), asyncio.ensure_future(_carry(other[0], one[1]))]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        one[1].close()
        other[1].close()


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while content := await reader.read(_SPLICE_BYTES):
            writer.write(content)
            await writer.drain()


def _proof(key: bytes, side: bytes, nonces: bytes) -> bytes:
    return hmac.digest(key, side + nonces, hashlib.sha256)


class LoopThread:
    """An event loop in a thread of its own: the launcher's thread waits for ranks, connections must not wait for it."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, name="connections", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, Any], seconds: float) -> Any:
        """Return the result of the coroutine; TimeoutError when it takes longer."""
        running = asyncio.run_coroutine_threadsafe(asyncio.wait_for(work, seconds), self._loop)
        return running.result()

    def stop(self) -> None:
        """End all connections."""
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._end)

    def _end(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()
        self._loop.call_soon(self._loop.stop)


def listener(address: str, port: int) -> socket.socket:
    """Return a socket that listens; without an address on all of them, IPv4 and IPv6."""
    if address or not socket.has_dualstack_ipv6():
        return socket.create_server((address, port), backlog=BACKLOG)
    return socket.create_server((address, port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
