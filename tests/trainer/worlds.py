"""Owns ranks that live as long as a test session, and the worlds made of them: importing Megatron costs seconds.

A world is torch.distributed's default group; each call gets a new one of the size it asks for, so that tests of every
layout share the same processes.
"""

from __future__ import annotations

import gc
import io
import multiprocessing
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from moejob_trainer.runtime.cpu_backend import cpu_backend

# Ranks find what stands in a test module under the name that pytest gives it: tests.trainer.parity.test_lora.
sys.path.append(str(Path(__file__).parents[2]))

# A rank that died leaves the others waiting in an exchange.
DEADLINE_SECONDS = 240.0
# A fork server keeps what it was first asked to import: everybody who starts ranks asks for the same.
PRELOADED = [
    "torch",
    "megatron.core.pipeline_parallel",
    "megatron.core.distributed",
    "transformers",
    "moejob_trainer.rank",
]


@dataclass(frozen=True)
class RankFailure:
    """The error of a rank, in place of a result."""

    text: str


class Worlds:
    """Up to `size` ranks."""

    def __init__(self, size: int, folder: Path) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self._context, self._folder, self._made = context, folder, 0
        self._ranks: list[tuple[Any, Connection]] = []
        self._size = size

    def run(self, size: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """Return the results of `function(*arguments)` on each rank of a new world. It has to be importable."""
        self._start_ranks(size)
        self._made += 1
        store = str(self._folder / f"store-{self._made}")
        connections = [connection for _, connection in self._ranks[:size]]
        for rank, connection in enumerate(connections):
            connection.send_bytes(_pack_value((store, rank, size, function, arguments)))
        answers = self._collect_results(connections)
        failed = [answer.text for answer in answers if isinstance(answer, RankFailure)]
        if failed:
            # Ranks that wait for one that failed cannot be used again.
            self.close()
            raise AssertionError(f"{len(failed)} of {size} ranks failed; the first:\n{failed[0]}")
        return answers

    def close(self) -> None:
        """Ends every rank."""
        for process, _ in self._ranks:
            process.kill()
        for process, _ in self._ranks:
            process.join()
        self._ranks = []

    def _start_ranks(self, size: int) -> None:
        if size > self._size:
            raise ValueError(f"a world of {size} ranks was asked for, but there are {self._size}")
        while len(self._ranks) < size:
            ours, theirs = self._context.Pipe()
            process = self._context.Process(target=_serve_requests, args=(theirs,), daemon=True)
            process.start()
            theirs.close()
            self._ranks.append((process, ours))

    def _collect_results(self, connections: list[Connection]) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + DEADLINE_SECONDS
        while len(answers) < len(connections) and not any(
            isinstance(answer, RankFailure) for answer in answers.values()
        ):
            silent = [connection for rank, connection in enumerate(connections) if rank not in answers]
            ready = wait(silent, max(0.0, deadline - time.monotonic()))
            for connection in ready:
                assert isinstance(connection, Connection)
                answers[connections.index(connection)] = _receive_result(connection)
            if not ready:
                return [
                    RankFailure(f"{len(silent)} of {len(connections)} ranks did not answer in {DEADLINE_SECONDS} s")
                ]
        if len(answers) < len(connections):
            # Who failed first is the cause; who waits for it has nothing to say.
            return [answer for answer in answers.values() if isinstance(answer, RankFailure)]
        return [answers[rank] for rank in range(len(connections))]


def _receive_result(connection: Connection) -> Any:
    try:
        return _unpack_value(connection.recv_bytes())
    except EOFError:
        return RankFailure("the rank died without a word")


def _serve_requests(connection: Connection) -> None:
    # What was imported before the fork is never garbage: to look through it after each world takes a third of a second.
    gc.freeze()
    with suppress(EOFError):
        while True:
            store, rank, size, function, arguments = _unpack_value(connection.recv_bytes())
            connection.send_bytes(_pack_value(_run_function(store, rank, size, function, arguments)))


def _pack_value(value: Any) -> bytes:
    # Otherwise tensors would travel as shared memory, which ends with the rank that made it.
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _unpack_value(packed: bytes) -> Any:
    return torch.load(io.BytesIO(packed), weights_only=False)


def _run_function(store: str, rank: int, size: int, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
    dist.init_process_group(
        cpu_backend(),
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=DEADLINE_SECONDS),
    )
    try:
        return function(*arguments)
    except BaseException:  # noqa: BLE001 whatever a test raises is its answer
        return RankFailure(traceback.format_exc())
    finally:
        dist.destroy_process_group()
        # Models hold groups, and gradient hooks hold models in cycles: without this, hundreds of idle threads of gloo
        # gather in a rank.
        gc.collect()
