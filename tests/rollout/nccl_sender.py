"""`python nccl_sender.py KEY NAME BYTES BUCKETS`: rank 0 of a group of two on the first GPU; waits for its end."""

from __future__ import annotations

import signal
import sys
from datetime import timedelta

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import BroadcastOptions, ProcessGroupNCCL

from moejob_api.contract.group_rendezvous import join_rendezvous
from rollout.doors import opened


def main(key: str, name: str, size: int, buckets: int) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    print(opened(bytes.fromhex(key), store.port), flush=True)  # noqa: T201
    named = PrefixStore(name, store)
    join_rendezvous(named, 2, timedelta(minutes=2))
    group = ProcessGroupNCCL(named, 0, 2, ProcessGroupNCCL.Options())
    options = BroadcastOptions()
    options.rootRank = options.rootTensor = 0
    # As the trainer: a byte to connect, then the buckets.
    numbers = torch.ones(size // 4).view(torch.uint8).cuda(0)
    for content in (numbers[:1], *[numbers] * buckets):
        group.broadcast([content.contiguous()], options).wait()  # type: ignore[attr-defined]  # untyped
    torch.cuda.synchronize(0)
    signal.pause()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
