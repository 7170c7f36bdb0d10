"""Owns ranks of torch.distributed on gloo that live as long as a test session: starting one costs seconds."""

from __future__ import annotations

import io
import multiprocessing
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

DEADLINE_SECONDS = 120.0


class RankPool:
    """`size` processes; a call runs on the first of them, which form a group."""

    def __init__(self, size: int, folder: Path) -> None:
        # One process imports torch for all of them.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["torch.distributed"])
        pipes = [context.Pipe() for _ in range(size)]
        self._connections = [ours for ours, _ in pipes]
        self._processes = [
            context.Process(target=_serve, args=(rank, size, str(folder / "store"), theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self._processes:
            process.start()
        # Only a rank holds its end now: when it dies, ours says so.
        for _, theirs in pipes:
            theirs.close()

    def run(self, ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """`function(group, *arguments)` on each of `ranks` ranks; what each one returned. It has to be importable."""
        asked = self._connections[:ranks]
        for connection in asked:
            connection.send_bytes(_packed((function, ranks, arguments)))
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(answers) < ranks:
            silent = [connection for rank, connection in enumerate(asked) if rank not in answers]
            ready = wait(silent, max(0.0, deadline - time.monotonic()))
            if not ready:
                raise TimeoutError(f"{len(silent)} of {ranks} ranks did not answer in {DEADLINE_SECONDS} s")
            for rank, connection in enumerate(asked):
                if connection in ready:
                    answers[rank] = _unpacked(connection.recv_bytes())
        return [answers[rank] for rank in range(ranks)]

    def close(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.join()


def _serve(rank: int, size: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    groups = {count: dist.new_group(list(range(count))) for count in range(1, size + 1)}
    while True:
        function, count, arguments = _unpacked(connection.recv_bytes())
        connection.send_bytes(_packed(function(groups[count], *arguments)))


def _packed(value: Any) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpacked(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), weights_only=False)
