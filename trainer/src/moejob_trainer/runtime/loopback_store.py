"""torch's TCPStore on loopback alone: it authenticates no client, and by itself would listen on all addresses."""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from moejob_api.addresses import LOOPBACK
from moejob_trainer.runtime.channel import listener


def loopback_store(timeout: timedelta) -> TCPStore:
    """Return a new store, on a free port."""
    with listener(LOOPBACK, 0) as found:
        port = found.getsockname()[1]
        # The store closes it.
        taken = found.detach()
    return TCPStore(LOOPBACK, port, is_master=True, wait_for_workers=False, timeout=timeout, master_listen_fd=taken)
