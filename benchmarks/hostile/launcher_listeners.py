"""One listener of the launcher in a process of its own, for benchmarks.hostile: its name.

`store SECRET` serves launchers that know that secret, and `launcher SECRET` is one: it is given the port with `begin`.
"""

from __future__ import annotations

import gc
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from benchmarks.hostile.probe import GapProbe, serve_until_told
from moejob_api.contract.addresses import LOOPBACK
from moejob_api.contract.pods import PodProgress, ReportedHeartbeat, RunProgress
from moejob_trainer.launcher.http_server import ProgressServer
from moejob_trainer.launcher.store import LauncherStore, LostPeers, StoreEntries, StoreServer
from moejob_trainer.runtime.channel import attempt_key, open_listening_socket
from moejob_trainer.runtime.loop_thread import LoopThread

RANKS = tuple(ReportedHeartbeat(rank=rank, pid=rank + 2, step=1, age_seconds=0.5) for rank in range(8))
PROGRESS = PodProgress(attempt=0, index=0, ready=True, ranks=RANKS, run=RunProgress(step=1, total_steps=100))


@contextmanager
def store(probe: GapProbe, secret: str) -> Iterator[int]:
    """Serve the rendezvous: its gap is that of the loop in which connections are answered."""
    loop, server = LoopThread(), StoreServer(StoreEntries(), key_of(secret))
    on = open_listening_socket(LOOPBACK, 0)
    loop.run(server.serve_on(on), 20)
    watched = threading.Thread(target=_watch, args=(loop, probe), daemon=True)
    watched.start()
    yield int(on.getsockname()[1])
    loop.stop()


def _watch(loop: LoopThread, probe: GapProbe) -> None:
    with suppress(BaseException):
        loop.run(probe.run_in_loop(), 86_400)


@contextmanager
def progress(probe: GapProbe, _: str) -> Iterator[int]:
    """Serve /progress: its gap is that of a thread such as the one that waits for ranks."""
    server = ProgressServer(LOOPBACK, 0, lambda: PROGRESS)
    threading.Thread(target=probe.run_in_thread, daemon=True).start()
    yield server.port
    server.close()


def key_of(secret: str) -> bytes:
    """Return the key of the first attempt."""
    return attempt_key(secret, "uid", 0)


class HonestLauncher:
    """Joins a rendezvous again and again, and keeps for how many seconds each of its answers was waited for."""

    def __init__(self, port: int, key: bytes) -> None:
        self._port, self._key = port, key
        self._seconds = list[float]()
        self._since = time.perf_counter()
        threading.Thread(target=self._run, daemon=True).start()

    def seconds(self) -> list[float]:
        """Return them, with the one that is waited for now."""
        return [*self._seconds, time.perf_counter() - self._since]

    def _run(self) -> None:
        while True:
            self._since = time.perf_counter()
            # As a launcher does: a store that does not answer may not be there yet.
            while not self._is_answered():
                time.sleep(0.05)
            self._seconds.append(time.perf_counter() - self._since)
            time.sleep(0.05)

    def _is_answered(self) -> bool:
        with suppress(LostPeers):
            return LauncherStore.join_store(LOOPBACK, self._port, self._key).add_to_counter("answers") > 0
        return False


def ask_until_told(secret: str) -> None:
    """Ask at the port that `begin` names; `end` asks for the seconds."""
    # It listens nowhere.
    _say(0)
    for line in sys.stdin:
        _, port = line.split()
        launcher = HonestLauncher(int(port), key_of(secret))
        _say({})
        sys.stdin.readline()
        _say(launcher.seconds())


def _say(words: object) -> None:
    sys.stdout.write(f"{json.dumps(words)}\n")
    sys.stdout.flush()


def main(name: str, secret: str) -> None:
    """Serve, or ask, until standard input ends."""
    probe = GapProbe()

    def begin() -> None:
        probe.gap_seconds = 0.0

    # As the launcher does once all is imported.
    gc.freeze()
    if name == "launcher":
        ask_until_told(secret)
        return
    chosen = {"store": store, "progress": progress}[name]
    with chosen(probe, secret) as port:
        serve_until_told(port, lambda: probe.gap_seconds, begin)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "")
