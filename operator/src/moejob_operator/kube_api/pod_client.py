"""Asks a pod for its progress, over HTTP/1.0 and with a bound on everything: the author of the reply may be anyone.

Not aiohttp: its client reads interim responses (1xx) without end, and bounds neither their number nor headers. HTTP/1.0
has neither interim responses nor chunks: a response is one head and one body, and ends with the connection.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from pydantic import ValidationError

from moejob_api.contract.pods import HttpPath, PodPort, PodProgress

# A pod of 16 ranks says 2 kB.
PROGRESS_BYTES = 64 * 1024
HEAD_BYTES = 16 * 1024
# The most commas and opening brackets of a body, those of its texts among them. A pod of 64 ranks with all measures and
# commits has 900. A body has no more values than that, and an error of validation costs 10 us.
PROGRESS_MARKS = 3 * 1024
# Pods asked at once: each takes a socket, and a process has a thousand sockets.
_CONVERSATIONS = 256


class MutePod(Exception):
    """A pod gives no readable reply."""


@dataclass(frozen=True)
class PodClient:
    """Asks pods, each for at most `seconds`."""

    seconds: float
    port: int = PodPort.PROGRESS.value
    conversations: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(_CONVERSATIONS))
    parsing: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def get_progress(self, address: str) -> PodProgress:
        """Return the progress that the pod at an address reports; it is an error when it reports none."""
        # The wait for a turn does not count as the pod's silence.
        async with self.conversations:
            try:
                async with asyncio.timeout(self.seconds):
                    content = await self._request_progress(address)
                    return await self._parse_in_turn(content)
            except (OSError, TimeoutError) as error:
                raise MutePod(repr(error)) from error

    async def _parse_in_turn(self, content: bytes) -> PodProgress:
        """Parse one body in each turn of the loop: however many arrive at once, the Lease is renewed between two."""
        async with self.parsing:
            await asyncio.sleep(0)
            return parse_progress(content)

    async def _request_progress(self, address: str) -> bytes:
        reader, writer = await asyncio.open_connection(address, self.port, limit=HEAD_BYTES)
        try:
            host = f"[{address}]" if ":" in address else address
            writer.write(f"GET {HttpPath.PROGRESS} HTTP/1.0\r\nHost: {host}:{self.port}\r\n\r\n".encode())
            return await read_response_body(reader)
        finally:
            writer.transport.abort()


async def read_response_body(reader: asyncio.StreamReader) -> bytes:
    """Return the body of a response; it is an error when it is no HTTP, too long, or no success."""
    try:
        head = await reader.readuntil(b"\r\n\r\n")
        _, status, *_ = head.partition(b"\r\n")[0].split(b" ")
    except (ValueError, asyncio.IncompleteReadError, asyncio.LimitOverrunError) as error:
        raise MutePod(f"it does not speak HTTP: {error!r}") from None
    if status != b"200":
        raise MutePod(f"it answers with {head[:100]!r}")
    return await _read_bounded(reader)


async def _read_bounded(reader: asyncio.StreamReader) -> bytes:
    content = b""
    while chunk := await reader.read(HEAD_BYTES):
        content += chunk
        if len(content) > PROGRESS_BYTES:
            raise MutePod(f"it says more than {PROGRESS_BYTES} bytes")
    return content


def parse_progress(content: bytes) -> PodProgress:
    """Parse the progress in a body, bounded and printable as the contract has it; without any it is an error."""
    if sum(map(content.count, (b",", b"[", b"{"))) > PROGRESS_MARKS:
        raise MutePod(f"it says more than {PROGRESS_MARKS} things")
    try:
        return PodProgress.model_validate_json(content)
    except ValidationError as error:
        # No text of the errors: a stranger decides how many there are, and their text takes longer than they do.
        raise MutePod(f"what it says has {error.error_count()} errors") from None
