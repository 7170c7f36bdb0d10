"""The store at which rank 0 and the workers of one engine meet: on loopback, open to workers that know a key.

torch's TCPStore authenticates no client: a stranger who reached it could read and falsify where the group meets, and
fill the memory of rank 0. So a port of the pod asks for a proof first, and carries the store's bytes after it.
"""

from __future__ import annotations

import asyncio
from contextlib import closing, suppress
from datetime import timedelta

from moejob_api.contract.addresses import LOOPBACK
from moejob_trainer.runtime.channel import BROKEN, Admission, splice_streams
from moejob_trainer.runtime.loop_thread import LoopThread
from moejob_trainer.runtime.loopback_store import loopback_store

_ANSWER_SECONDS = 20.0


class GroupStore:
    """One store, and the port at `host` behind which engines find it. NCCL asks the store at the end of its group."""

    def __init__(self, host: str, key: bytes, timeout: timedelta) -> None:
        self.store = loopback_store(timeout)
        self._admission, self._loop = Admission(key), LoopThread()
        self._server: asyncio.Server = self._loop.run(self._open_server(host), _ANSWER_SECONDS)
        self.port: int = self._server.sockets[0].getsockname()[1]

    def close(self) -> None:
        """Refuse further engines, and end the connections of the present ones."""
        self._loop.run(self._close_server(), _ANSWER_SECONDS)
        self._loop.stop()

    async def _open_server(self, host: str) -> asyncio.Server:
        # Port 0: the system picks a free port, for every engine has a store of its own.
        return await asyncio.start_server(self._serve_client, host, 0)

    async def _close_server(self) -> None:
        self._server.close()

    async def _serve_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with closing(writer), suppress(*BROKEN):
            await self._admission.admit_client(reader, writer)
            await splice_streams((reader, writer), await asyncio.open_connection(LOOPBACK, self.store.port))
