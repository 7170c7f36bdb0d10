"""Worker processes of one reward: started ahead of their first batch, interrupted when a batch takes too long.

An import may take half a minute. It has a limit of its own, and a process that was interrupted keeps its imports.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from moejob_api.job.grpo import Reward
from moejob_trainer.rewards.completion import Completion, FailureKind, RewardFailed
from moejob_trainer.rewards.confinement import INTERRUPT, worker_environment
from moejob_trainer.rewards.messages import READY, read_reply, request_line

# More than the scores of the largest batch take.
_MOST_LINE_BYTES = 16 * 2**20
# A function that handles the interruption gets this long to end.
_INTERRUPT_SECONDS = 5.0
# A process that the kernel cannot end is left behind; the launcher ends it with the ranks.
_REAP_SECONDS = 5.0
_LOOK_SECONDS = 0.05
# Signals that a process gets from outside: of the kernel for memory, or of who ends it. Another try may be spared.
_KILLERS = frozenset({signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP})


@dataclass(frozen=True, slots=True)
class _RunningWorker:
    process: subprocess.Popen[bytes]
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter


class WorkerProcess:
    """One process, started again when it has died or had to be killed."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        self._worker: _RunningWorker | None = None
        self._is_ready = False
        self._request = READY

    async def start(self) -> None:
        """Start the process, which imports what it needs meanwhile."""
        if self._worker is None:
            self._worker, self._is_ready = await _start_reward_worker(self._reward), False

    async def wait_until_ready(self) -> None:
        """Wait until the process can score; raises RewardFailed."""
        await self.start()
        if self._is_ready:
            return
        limit = self._reward.start_timeout_seconds
        try:
            async with asyncio.timeout(limit):
                await self._read_scores(READY)
        except TimeoutError:
            await self.close()
            raise RewardFailed(
                FailureKind.TIMEOUT,
                f"its process had not imported everything after {limit} s; raise startTimeoutSeconds",
            ) from None
        except RewardFailed:
            await self.close()
            raise
        self._is_ready = True

    async def score_batch(self, completions: Sequence[Completion]) -> Sequence[object]:
        """Return the process's score of each; raises RewardFailed."""
        await self.wait_until_ready()
        self._request += 1
        line = request_line(self._request, completions)
        try:
            async with asyncio.timeout(self._reward.timeout_seconds):
                await self._send(line)
                return await self._read_scores(self._request)
        except TimeoutError:
            await self._interrupt_batch()
            raise RewardFailed(FailureKind.TIMEOUT, f"it took longer than {self._reward.timeout_seconds} s") from None

    async def close(self) -> None:
        """Kill the process and all processes of its session."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        _signal_session(worker.process, signal.SIGKILL)
        worker.writer.close()
        await _wait_for_exit(worker.process, _REAP_SECONDS)

    async def _interrupt_batch(self) -> None:
        """End the batch; the process too where it does not let itself be interrupted."""
        if self._worker is None:
            return
        with suppress(ProcessLookupError):
            self._worker.process.send_signal(INTERRUPT)
        try:
            async with asyncio.timeout(_INTERRUPT_SECONDS):
                await self._read_scores(self._request)
        except RewardFailed:
            # The process has reported the interruption, or died of it, and then there is no worker any more.
            return
        except TimeoutError:
            await self.close()

    async def _send(self, line: bytes) -> None:
        if self._worker is None:
            raise RuntimeError("a worker is started before it is asked")
        with suppress(ConnectionError):
            self._worker.writer.write(line)
            await self._worker.writer.drain()

    async def _read_scores(self, request: int) -> Sequence[object]:
        """Return the scores of this request; skip replies to earlier ones."""
        while True:
            try:
                reply = read_reply(await self._read_line())
            except RewardFailed:
                await self.close()
                raise
            if reply.request != request:
                continue
            if reply.failure is not None:
                raise reply.failure.as_error()
            return reply.scores

    async def _read_line(self) -> bytes:
        if self._worker is None:
            raise RuntimeError("a worker is started before it is asked")
        process = self._worker.process
        reading = asyncio.ensure_future(self._worker.reader.readline())
        try:
            # A child of the process may hold the socket open, so its end is no sign of the process's.
            is_over = False
            while not is_over and not reading.done():
                is_over = process.poll() is not None
                await asyncio.wait({reading}, timeout=_LOOK_SECONDS)
            line = reading.result() if reading.done() else b""
        except ConnectionError:
            line = b""
        except ValueError as error:
            raise RewardFailed(
                FailureKind.UNREADABLE, f"its process wrote a line of more than {_MOST_LINE_BYTES} bytes"
            ) from error
        finally:
            reading.cancel()
        if not line.endswith(b"\n"):
            raise await _death_of(process)
        return line


async def _death_of(process: subprocess.Popen[bytes]) -> RewardFailed:
    # The socket closes a moment before the process is gone.
    code = await _wait_for_exit(process, 1.0)
    if code is None:
        return RewardFailed(FailureKind.DIED, "its process closed its connection")
    if -code in (signal.SIGVTALRM, signal.SIGPROF):
        text = "its process died: one answer took it too many seconds of a processor"
        return RewardFailed(FailureKind.DIED, text)
    if code >= 0:
        return RewardFailed(FailureKind.DIED, f"its process died with exit code {code}")
    kind = FailureKind.KILLED if -code in _KILLERS else FailureKind.DIED
    return RewardFailed(kind, f"its process died of {signal.Signals(-code).name}")


async def _wait_for_exit(process: subprocess.Popen[bytes], seconds: float) -> int | None:
    """Return the exit code of a process that is about to end; None where it does not within these seconds."""
    for _ in range(round(seconds / _LOOK_SECONDS)):
        if process.poll() is not None:
            break
        await asyncio.sleep(_LOOK_SECONDS)
    return process.poll()


def _signal_session(process: subprocess.Popen[bytes], number: signal.Signals) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, number)


async def _start_reward_worker(reward: Reward) -> _RunningWorker:
    own_socket, worker_socket = socket.socketpair()
    with worker_socket:
        process = _start_worker_process(reward, worker_socket.fileno())
    reader, writer = await asyncio.open_connection(sock=own_socket, limit=_MOST_LINE_BYTES)
    writer.write(reward.model_dump_json(by_alias=True, exclude_none=True).encode() + b"\n")
    return _RunningWorker(process, reader, writer)


def _start_worker_process(reward: Reward, connection: int) -> subprocess.Popen[bytes]:
    # What a user's function prints goes to the log, and its standard input is empty.
    return subprocess.Popen(
        [sys.executable, "-m", "moejob_trainer.rewards.worker", str(connection)],
        stdin=subprocess.DEVNULL,
        stdout=2,
        pass_fds=(connection,),
        env=worker_environment(reward, os.environ),
        start_new_session=True,
    )
