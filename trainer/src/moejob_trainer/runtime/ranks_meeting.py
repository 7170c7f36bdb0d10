"""The store where the ranks of a round meet, as a rank reaches it: at a port of its own pod's loopback.

torch's TCPStore authenticates no client, so launchers carry its bytes. MASTER_ADDR and MASTER_PORT stay free for what
scripts and libraries open by themselves.
"""

from __future__ import annotations

from datetime import timedelta

from torch._C._distributed_c10d import TCPStore

from moejob_api.contract.addresses import LOOPBACK
from moejob_trainer.runtime.environment import RankEnvironment


def ranks_store(environment: RankEnvironment, timeout: timedelta) -> TCPStore | None:
    """Return the store that a launcher opened for these ranks; None without a launcher: torch's env:// makes one."""
    if environment.store_port is None:
        return None
    return TCPStore(LOOPBACK, environment.store_port, timeout=timeout)
