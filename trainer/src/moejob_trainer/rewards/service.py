"""A reward that an HTTP service computes: POST {prompts, completions, fields} -> {scores}, in batches."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import httpx

from moejob_api.job.grpo import Reward
from moejob_trainer.rewards.completion import Completion, RewardFailed, Unreachable

# Errors that may be gone a moment later.
_PASSING = frozenset({408, 425, 429, 500, 502, 503, 504})
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.25, 10.0
# More than scores of the largest batch take.
_MOST_ANSWER_BYTES = 16 * 2**20


class Service:
    """The service of one reward."""

    def __init__(self, reward: Reward) -> None:
        self._reward, self._url = reward, reward.url or ""
        self._client = httpx.AsyncClient(timeout=float(reward.timeout_seconds))

    async def scores(self, completions: Sequence[Completion]) -> list[Any]:
        """Return the service's score of each; raises RewardFailed when its tries are spent."""
        body = _body(completions)
        pause = _FIRST_PAUSE_SECONDS
        for left in reversed(range(self._reward.retries + 1)):
            try:
                async with asyncio.timeout(self._reward.timeout_seconds):
                    return await self._asked(body)
            except (httpx.TransportError, TimeoutError, _Passing) as error:
                if left == 0:
                    tries = self._reward.retries + 1
                    raise Unreachable(f"{type(error).__name__}: {error} (tries: {tries})") from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_SECONDS)
        raise RuntimeError("the last try returns or raises")

    async def close(self) -> None:
        """Give up the connections."""
        await self._client.aclose()

    async def _asked(self, body: bytes) -> list[Any]:
        headers = {"content-type": "application/json"}
        async with self._client.stream("POST", self._url, content=body, headers=headers) as response:
            if response.status_code in _PASSING:
                raise _Passing(f"HTTP {response.status_code}")
            if response.status_code != httpx.codes.OK:
                raise RewardFailed(f"{self._url} answered HTTP {response.status_code}")
            return _scores(await _bounded(response))


class _Passing(RuntimeError):
    """An answer after which another try is worth it."""


def _body(completions: Sequence[Completion]) -> bytes:
    told = {
        "prompts": [each.prompt for each in completions],
        "completions": [each.text for each in completions],
        "fields": [dict(each.fields) for each in completions],
    }
    return json.dumps(told, default=str).encode()


async def _bounded(response: httpx.Response) -> bytes:
    found = bytearray()
    async for part in response.aiter_bytes():
        found += part
        if len(found) > _MOST_ANSWER_BYTES:
            raise RewardFailed(f"its answer is longer than {_MOST_ANSWER_BYTES} bytes")
    return bytes(found)


def _scores(body: bytes) -> list[Any]:
    try:
        told = json.loads(body)
    except ValueError as error:
        raise RewardFailed(f"its answer is not JSON: {error}") from error
    if not isinstance(told, dict) or not isinstance(told.get("scores"), list):
        raise RewardFailed("its answer has no list `scores`")
    found: list[Any] = told["scores"]
    return found
