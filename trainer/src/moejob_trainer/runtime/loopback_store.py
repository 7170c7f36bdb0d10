"""torch's TCPStore on loopback alone: it authenticates no client, and by itself would listen on all addresses."""

from __future__ import annotations

import socket
from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from moejob_api.contract.addresses import LOOPBACK
from moejob_trainer.runtime.channel import open_listening_socket


def loopback_store(timeout: timedelta) -> TCPStore:
    """Return a new store, on a free port."""
    return store_at(open_listening_socket(LOOPBACK, 0), timeout)


def store_at(sock: socket.socket, timeout: timedelta) -> TCPStore:
    """Return a new store that answers at this socket, and closes it."""
    port: int = sock.getsockname()[1]
    return TCPStore(
        LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=sock.detach()
    )
