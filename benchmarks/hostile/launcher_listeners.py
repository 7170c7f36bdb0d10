"""One listener of the launcher in a process of its own, for benchmarks.hostile: its name."""

from __future__ import annotations

import gc
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from benchmarks.hostile.probe import GapProbe, serve_until_told
from moejob_api.contract import PodProgress, ReportedHeartbeat, RunProgress
from moejob_trainer.launcher.http_server import ProgressServer
from moejob_trainer.launcher.store import Entries, StoreServer
from moejob_trainer.runtime.channel import LoopThread, attempt_key, listener

RANKS = tuple(ReportedHeartbeat(rank=rank, pid=rank + 2, step=1, age_seconds=0.5) for rank in range(8))
PROGRESS = PodProgress(attempt=0, index=0, ready=True, ranks=RANKS, run=RunProgress(step=1, total_steps=100))


@contextmanager
def store(probe: GapProbe) -> Iterator[int]:
    """Serve the rendezvous: its gap is that of the loop in which connections are answered."""
    loop, server = LoopThread(), StoreServer(Entries(), attempt_key(os.urandom(32).hex(), "uid", 0))
    on = listener("127.0.0.1", 0)
    loop.run(server.listen(on), 20)
    watched = threading.Thread(target=_watch, args=(loop, probe), daemon=True)
    watched.start()
    yield int(on.getsockname()[1])
    loop.stop()


def _watch(loop: LoopThread, probe: GapProbe) -> None:
    with suppress(BaseException):
        loop.run(probe.run_in_loop(), 86_400)


@contextmanager
def progress(probe: GapProbe) -> Iterator[int]:
    """Serve /progress: its gap is that of a thread such as the one that waits for ranks."""
    server = ProgressServer("127.0.0.1", 0, lambda: PROGRESS)
    threading.Thread(target=probe.run_in_thread, daemon=True).start()
    yield server.port
    server.close()


def main(name: str) -> None:
    """Serve until standard input ends."""
    probe = GapProbe()

    def begin() -> None:
        probe.gap_seconds = 0.0

    # As the launcher does once all is imported.
    gc.freeze()
    chosen = {"store": store, "progress": progress}[name]
    with chosen(probe) as port:
        serve_until_told(port, lambda: probe.gap_seconds, begin)


if __name__ == "__main__":
    main(sys.argv[1])
