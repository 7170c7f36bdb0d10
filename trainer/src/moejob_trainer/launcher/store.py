"""The store that all launchers of an attempt share, open to those that know the attempt's secret; one pod hosts it.

torch's TCPStore authenticates no client: a stranger could write the ending of a round, or where its ranks meet. So the
launchers have a server of their own, and the TCPStore that ranks must have listens on pod 0's loopback only: launchers
carry its bytes to their ranks over the same authenticated connections. Whatever fails is LostPeers.
All operations return at once: a blocking one would keep the launcher from its ranks and from signals.
"""

from __future__ import annotations

import asyncio
import socket
import weakref
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from enum import StrEnum
from threading import Lock
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moejob_api.contract.addresses import LOOPBACK
from moejob_trainer.runtime.channel import (
    BACKLOG,
    BROKEN,
    Admission,
    Streams,
    UnknownPeer,
    open_listening_socket,
    prove_to_server,
    read_frame,
    splice_streams,
    write_frame,
)
from moejob_trainer.runtime.loop_thread import LoopThread

# A store that does not answer for this long is lost.
_ANSWER_SECONDS = 20.0
# Of launchers that arrive together; those that have arrived get replies in between.
_ACCEPTED_AT_ONCE = 8
# Names and texts together; a job of a thousand restarts on a thousand pods stays below.
_STORE_BYTES = 256 << 20


class LostPeers(RuntimeError):
    """The other pods cannot be reached, or do not want this one."""


class LostStore(LostPeers):
    """The store does not answer; the pod that hosts it may be replaced."""


class Operation(StrEnum):
    """An operation that a launcher may ask of the store."""

    PUT_FIRST = "put_first"
    GET = "get"
    COUNT = "count"
    # Counts once the connection has ended: the process behind it is gone, or will find that it has lost the store.
    COUNT_AT_END = "count_at_end"
    # From here on the connection carries the bytes of the ranks' store.
    CONNECT = "connect"


class StoreRequest(BaseModel):
    """One frame to the store."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    operation: Annotated[Operation, Field(strict=False)]
    name: Annotated[str, Field(max_length=256)] = ""
    text: Annotated[str, Field(max_length=32_768)] = ""
    number: Annotated[int, Field(ge=-(2**40), le=2**40)] = 0


class StoreReply(BaseModel):
    """One frame from the store."""

    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")

    text: str | None = None
    number: int = 0
    refused: str = ""


class StoreEntries:
    """Small texts and counters under names. Nothing is ever removed: the first writer of a text wins."""

    def __init__(self, limit_bytes: int = _STORE_BYTES) -> None:
        self._lock = Lock()
        self._texts: dict[str, str] = {}
        self._counts: dict[str, int] = {}
        self._bytes_left = limit_bytes

    def apply_request(self, request: StoreRequest) -> StoreReply:
        """Apply a request. May be called from any thread."""
        with self._lock:
            match request.operation:
                case Operation.PUT_FIRST if request.name not in self._texts and not self._has_room_for(request):
                    return StoreReply(refused="the store is full")
                case Operation.PUT_FIRST:
                    return StoreReply(text=self._texts.setdefault(request.name, request.text))
                case Operation.GET:
                    return StoreReply(text=self._texts.get(request.name))
                case Operation.COUNT if request.name not in self._counts and not self._has_room_for(request):
                    return StoreReply(refused="the store is full")
                case Operation.COUNT:
                    number = self._counts[request.name] = self._counts.get(request.name, 0) + request.number
                    return StoreReply(number=number)
                case Operation.COUNT_AT_END:
                    # The host of the store has no connection that could end.
                    return StoreReply()
                case Operation.CONNECT:
                    return StoreReply(refused="there is no such store of ranks")

    def _has_room_for(self, request: StoreRequest) -> bool:
        self._bytes_left -= len(request.name) + len(request.text)
        return self._bytes_left >= 0


class StoreServer:
    """Answers launchers that know the key, and carries bytes of their ranks to a store in `ranks_ports`."""

    def __init__(self, entries: StoreEntries, key: bytes) -> None:
        self._entries, self._admission = entries, Admission(key)
        self._server: asyncio.Server | None = None
        self.ranks_ports: set[int] = set()

    async def serve_on(self, sock: socket.socket) -> None:
        """Serve until the loop ends."""
        self._server = await asyncio.start_server(self._serve_client, sock=sock, backlog=_ACCEPTED_AT_ONCE)
        # asyncio uses its backlog as the length of the queue, too, and a large gang arrives together.
        sock.listen(BACKLOG)

    async def stop_listening(self) -> None:
        """Stop listening: a socket of a loop that has ended would let clients in, and answer none."""
        if self._server is not None:
            self._server.close()

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(*BROKEN):
            await self._admission.admit_client(reader, writer)
            await self._reply_to_requests(reader, writer)

    async def _reply_to_requests(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        last_request: StoreRequest | None = None
        try:
            while True:
                request = StoreRequest.model_validate_json(await read_frame(reader))
                if request.operation is Operation.COUNT_AT_END:
                    last_request = StoreRequest(operation=Operation.COUNT, name=request.name, number=1)
                if not await self._reply_to_request(request, (reader, writer)):
                    return
        finally:
            if last_request is not None:
                self._entries.apply_request(last_request)

    async def _reply_to_request(self, request: StoreRequest, streams: Streams) -> bool:
        """Reply to one request; return false once the connection has carried bytes of ranks."""
        writer = streams[1]
        if request.operation is Operation.CONNECT and request.number in self.ranks_ports:
            ranks = await asyncio.open_connection(LOOPBACK, request.number)
            await write_frame(writer, StoreReply().model_dump_json().encode())
            await splice_streams(streams, ranks)
            return False
        await write_frame(writer, self._entries.apply_request(request).model_dump_json().encode())
        return True


class StoreClient:
    """One launcher's connections to the store that another pod hosts."""

    def __init__(self, loop: LoopThread, host: str, port: int, key: bytes) -> None:
        self._loop, self._place, self._key = loop, (host, port), key
        self._lock = Lock()
        self._streams: Streams = loop.run(self._open_streams(), _ANSWER_SECONDS)
        self._forwarder: asyncio.Server | None = None

    def send_request(self, request: StoreRequest) -> StoreReply:
        """Ask the store."""
        with self._lock:
            reply: StoreReply = self._loop.run(_exchange_frames(self._streams, request), _ANSWER_SECONDS)
        return reply

    def forward_ranks(self, ranks_port: int) -> int:
        """Listen on loopback for this pod's ranks, carry their bytes to the ranks' store, and return the port."""
        if self._forwarder is not None:
            # Ranks of the round before are dead.
            self._forwarder.close()
        sock = open_listening_socket(LOOPBACK, 0)
        port: int = sock.getsockname()[1]

        async def carry_connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with closing(writer), suppress(*BROKEN):
                streams = await asyncio.wait_for(self._open_streams(), _ANSWER_SECONDS)
                request = StoreRequest(operation=Operation.CONNECT, number=ranks_port)
                if not (await _exchange_frames(streams, request)).refused:
                    await splice_streams((reader, writer), streams)

        self._forwarder = self._loop.run(asyncio.start_server(carry_connection, sock=sock), _ANSWER_SECONDS)
        return port

    async def _open_streams(self) -> Streams:
        reader, writer = await asyncio.open_connection(*self._place)
        try:
            await prove_to_server(reader, writer, self._key)
        except asyncio.IncompleteReadError:
            writer.close()
            raise UnknownPeer("it belongs to another attempt, or has another secret") from None
        return reader, writer


class LauncherStore:
    """The store as a launcher uses it. It ends with this object."""

    def __init__(
        self,
        end: Callable[[], None],
        apply_request: Callable[[StoreRequest], StoreReply],
        ranks_port: Callable[[int], int],
        port: int,
    ) -> None:
        self._apply_request, self._ranks_port, self.port = apply_request, ranks_port, port
        self._finalizer = weakref.finalize(self, end)

    @classmethod
    def host_store(cls, address: str, port: int, key: bytes) -> LauncherStore:
        """Host a new store on this machine; port 0 takes a free one."""
        entries, loop = StoreEntries(), LoopThread()
        server = StoreServer(entries, key)
        with _as_lost_peers(f"{address}:{port}"):
            sock = open_listening_socket(address, port)
            loop.run(server.serve_on(sock), _ANSWER_SECONDS)

        def register_port(ranks_port: int) -> int:
            server.ranks_ports = {ranks_port}
            return ranks_port

        def end_server() -> None:
            with suppress(RuntimeError, TimeoutError):
                loop.run(server.stop_listening(), _ANSWER_SECONDS)
            loop.stop()

        return cls(end_server, entries.apply_request, register_port, sock.getsockname()[1])

    @classmethod
    def join_store(cls, host: str, port: int, key: bytes) -> LauncherStore:
        """Join the store that another pod hosts, which must be listening already."""
        loop = LoopThread()
        with _as_lost_peers(f"{host}:{port}"):
            client = StoreClient(loop, host, port, key)
        return cls(loop.stop, client.send_request, client.forward_ranks, port)

    def close(self) -> None:
        """End the connections, and the server of a store that is hosted here."""
        self._finalizer()

    def put_first(self, name: str, text: str) -> str:
        """Write a text unless the name has one; return the text that counts."""
        return self._send_request(StoreRequest(operation=Operation.PUT_FIRST, name=name, text=text)).text or ""

    def get(self, name: str) -> str | None:
        """Return the value of a key."""
        return self._send_request(StoreRequest(operation=Operation.GET, name=name)).text

    def add_to_counter(self, name: str, more: int = 1) -> int:
        """Add to a counter, which starts at 0, and return its new value."""
        return self._send_request(StoreRequest(operation=Operation.COUNT, name=name, number=more)).number

    def count_at_end(self, name: str) -> None:
        """Have the store add to a counter once it has lost this launcher; nothing for the pod that hosts it."""
        self._send_request(StoreRequest(operation=Operation.COUNT_AT_END, name=name))

    def reach_ranks(self, ranks_port: int) -> int:
        """Return the port of this pod's loopback under which its ranks reach the store that the host has for them."""
        with _as_lost_peers("the store of the ranks"):
            return self._ranks_port(ranks_port)

    def _send_request(self, request: StoreRequest) -> StoreReply:
        with _as_lost_peers(request.name):
            reply = self._apply_request(request)
        if reply.refused:
            raise LostPeers(f"the store of the rendezvous refused {request.name}: {reply.refused}")
        return reply


def is_listening(host: str, port: int) -> bool:
    """Return true when a server answers there; a name that is not known yet has none."""
    try:
        socket.create_connection((host, port), timeout=2.0).close()
    except OSError:
        return False
    return True


async def _exchange_frames(streams: Streams, request: StoreRequest) -> StoreReply:
    reader, writer = streams
    await write_frame(writer, request.model_dump_json().encode())
    return StoreReply.model_validate_json(await read_frame(reader))


@contextmanager
def _as_lost_peers(subject: str) -> Iterator[None]:
    failures = (RuntimeError, OSError, EOFError, TimeoutError, ValidationError, UnknownPeer)
    try:
        yield
    except failures as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        kind = LostPeers if isinstance(error, UnknownPeer) else LostStore
        raise kind(f"the store of the rendezvous does not answer ({subject}): {reason}") from None
