"""The store where the ranks of a round meet: torch's TCPStore, in a process of its own.

A launcher would have to import torch for it, which takes seconds and memory that the fork server has spent already.
"""

from __future__ import annotations

import os
import socket
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext, ForkServerProcess

from moejob_api.contract.addresses import LOOPBACK
from moejob_trainer.launcher.fork_server import SERVER, die_with_parent
from moejob_trainer.runtime.channel import open_listening_socket

# TCPStore brings a client of its own, which would wait this long for a key, and is asked for none.
_ANSWER_SECONDS = 20.0


class RanksStore:
    """The store of the present round. It ends with the next one, with the fork server, and with this process."""

    def __init__(self, context: ForkServerContext) -> None:
        self._context = context
        self._server_connection: Connection | None = None
        self._process: ForkServerProcess | None = None

    def open_new_store(self) -> int:
        """Open a new store on loopback, which no rank of an earlier round can find, and return its port."""
        if self._server_connection is not None:
            self._server_connection.close()
        self._server_connection, launcher = self._context.Pipe()
        with open_listening_socket(LOOPBACK, 0) as sock, launcher:
            # It is a daemon, so that nothing waits for it when the launcher ends.
            self._process = self._context.Process(
                target=_serve_ranks, args=(sock, launcher), name="ranks-store", daemon=True
            )
            self._process.start()
            port: int = sock.getsockname()[1]
        return port

    def has_ended(self) -> bool:
        """Return whether the store that this launcher opened has ended: ranks would look for it for half an hour."""
        return self._process is not None and self._process.exitcode is not None


def _serve_ranks(sock: socket.socket, launcher: Connection) -> None:
    """Answer ranks until the launcher closes its end. Runs in a fresh child of the fork server."""
    die_with_parent(SERVER)
    # Ctrl-C in a terminal is for the launcher alone.
    os.setsid()
    # Ranks that never come need no torch, and not every fork server has imported it.
    if launcher in wait([sock, launcher]):
        return
    from moejob_trainer.runtime.loopback_store import store_at  # noqa: PLC0415

    store = store_at(sock, timedelta(seconds=_ANSWER_SECONDS))
    launcher.poll(None)
    del store
