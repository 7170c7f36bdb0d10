"""Connections between processes of one job, open only to a peer that knows a key of its secret.

Both prove it as in moejob_api.contract.handshake. Launchers' key is derived from secret, job and attempt, so a launcher
of an older attempt is a stranger too. What follows is not encrypted: this keeps out those who can connect, not one who
can rewrite packets between two pods.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import os
import socket
from contextlib import suppress

from moejob_api.contract.handshake import NONCE_BYTES, PROOF_BYTES, client_proof, is_equal, server_proof

# No message of a launcher comes near it. A larger length prefix must not allocate memory.
FRAME_BYTES = 1 << 18
# Connections that wait to be accepted: all launchers of a gang may come at once.
BACKLOG = 1024
# Connections that have not proved anything yet; of more the oldest are closed.
UNPROVED_CONNECTIONS = 256
# A peer that knows the key proves it in two packets.
_ADMIT_SECONDS = 5.0
_PREFIX_BYTES = 4
_SPLICE_BYTES = 1 << 16


class UnknownPeer(Exception):
    """The peer does not know the key."""


# Errors that end one connection only: a peer that leaves, is silent, sends nonsense or proves nothing.
BROKEN = (OSError, ValueError, TimeoutError, asyncio.IncompleteReadError, UnknownPeer)


def attempt_key(secret: str, uid: str, attempt: int) -> bytes:
    """Return the key that the launchers of one attempt of a job share."""
    return hmac.digest(secret.encode(), f"moejob launchers\0{uid}\0{attempt}".encode(), hashlib.sha256)


class Admission:
    """Admits clients that know a key, and bounds the number and time of clients without a proof yet."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        # The oldest first.
        self._unproved: dict[asyncio.StreamWriter, None] = {}

    async def admit_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Return when a client has proved that it knows the key; raises when it has not, or not in time.

        At the bound the oldest unproven connection gives way: a client with the key needs milliseconds.
        """
        if len(self._unproved) >= UNPROVED_CONNECTIONS:
            oldest = next(iter(self._unproved))
            # Off the list at once: others may come before it has ended.
            del self._unproved[oldest]
            oldest.transport.abort()
        self._unproved[writer] = None
        try:
            await asyncio.wait_for(_require_proof(reader, writer, self._key), _ADMIT_SECONDS)
        finally:
            self._unproved.pop(writer, None)


async def _require_proof(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> None:
    server_nonce = os.urandom(NONCE_BYTES)
    writer.write(server_nonce)
    client_nonce = await reader.readexactly(NONCE_BYTES)
    proof = await reader.readexactly(PROOF_BYTES)
    if not is_equal(proof, client_proof(key, server_nonce, client_nonce)):
        raise UnknownPeer("the client does not know the secret of this attempt")
    writer.write(server_proof(key, server_nonce, client_nonce))
    await writer.drain()


async def prove_to_server(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, key: bytes) -> None:
    """Prove to a server that this client knows the key; raises when the server does not know it."""
    server_nonce, client_nonce = await reader.readexactly(NONCE_BYTES), os.urandom(NONCE_BYTES)
    writer.write(client_nonce + client_proof(key, server_nonce, client_nonce))
    proof = await reader.readexactly(PROOF_BYTES)
    if not is_equal(proof, server_proof(key, server_nonce, client_nonce)):
        raise UnknownPeer("the server does not know the secret of this attempt")


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


async def splice_streams(first: Streams, second: Streams) -> None:
    """Carry bytes both ways until either side ends, then close both."""
    ways = [
        asyncio.ensure_future(_carry_bytes(first[0], second[1])),
        asyncio.ensure_future(_carry_bytes(second[0], first[1])),
    ]
    try:
        await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for way in ways:
            way.cancel()
        first[1].close()
        second[1].close()


async def _carry_bytes(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while content := await reader.read(_SPLICE_BYTES):
            writer.write(content)
            await writer.drain()


def open_listening_socket(address: str, port: int) -> socket.socket:
    """Return a socket that listens; without an address on all of them, IPv4 and IPv6."""
    if address or not socket.has_dualstack_ipv6():
        return socket.create_server((address, port), backlog=BACKLOG)
    return socket.create_server((address, port), family=socket.AF_INET6, backlog=BACKLOG, dualstack_ipv6=True)
