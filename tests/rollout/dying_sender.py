"""`python dying_sender.py KEY BYTES MOST`: rank 0 of a group of two, which dies when MOST of its bytes have arrived."""

from __future__ import annotations

import os
import signal
import socket
import sys
from contextlib import suppress
from datetime import timedelta
from operator import attrgetter
from pathlib import Path

import torch
from torch._C._distributed_c10d import TCPStore
from torch.distributed import BroadcastOptions, ProcessGroupGloo

from rollout.doors import opened

# Where the kernel's struct tcp_info has the bytes that the other end has acknowledged.
_ACKNOWLEDGED = slice(120, 128)


def main(key: str, size: int, most: int) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(opened(bytes.fromhex(key), store.port), flush=True)  # noqa: T201
    group = ProcessGroupGloo(store, 0, 2, timedelta(minutes=5))
    options = BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    sending = group.broadcast([torch.ones(size, dtype=torch.uint8)], options)  # type: ignore[attr-defined]  # untyped
    while _acknowledged() < most:
        pass
    os.kill(os.getpid(), signal.SIGKILL)
    sending.wait()


def _acknowledged() -> int:
    """Return the most that any connection of this process has sent."""
    return max((_sent(int(name)) for name in map(attrgetter("name"), Path("/proc/self/fd").iterdir())), default=0)


def _sent(descriptor: int) -> int:
    with suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as found:
        told = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKNOWLEDGED.stop)
        return int.from_bytes(told[_ACKNOWLEDGED], sys.byteorder)
    return 0


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
