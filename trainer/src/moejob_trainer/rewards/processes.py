"""Worker processes of one reward: started when they are needed, killed when a batch takes too long."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from moejob_api.job.grpo import Reward
from moejob_trainer.rewards.completion import Completion, RewardFailed

# A line may hold a batch of long answers.
_MOST_LINE_BYTES = 2**30


class WorkerProcess:
    """One process, made again when it has died or was killed."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        self._process: asyncio.subprocess.Process | None = None

    async def scores(self, completions: Sequence[Completion]) -> list[Any]:
        """Return the process's score of each; raises RewardFailed."""
        try:
            async with asyncio.timeout(self._reward.timeout_seconds):
                line = await self._answer(completions)
        except TimeoutError:
            await self.close()
            raise RewardFailed(f"it took longer than {self._reward.timeout_seconds} s") from None
        except (BrokenPipeError, ConnectionResetError):
            line = b""
        if not line:
            await self.close()
            raise RewardFailed("its process died")
        told = json.loads(line)
        if "error" in told:
            raise RewardFailed(told["error"])
        found: list[Any] = told["scores"]
        return found

    async def close(self) -> None:
        """End the process, whatever it does."""
        process, self._process = self._process, None
        if process is None:
            return
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()

    async def _answer(self, completions: Sequence[Completion]) -> bytes:
        if self._process is None:
            self._process = await _started(self._reward)
        process = self._process
        if process.stdin is None or process.stdout is None:
            raise RuntimeError("a worker has pipes")
        process.stdin.write((json.dumps([asdict(each) for each in completions], default=str) + "\n").encode())
        await process.stdin.drain()
        return await process.stdout.readline()


async def _started(reward: Reward) -> asyncio.subprocess.Process:
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-m", "moejob_trainer.rewards.worker"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=_MOST_LINE_BYTES,
    )
    if process.stdin is None:
        raise RuntimeError("a worker has pipes")
    process.stdin.write((reward.model_dump_json(by_alias=True, exclude_none=True) + "\n").encode())
    return process
