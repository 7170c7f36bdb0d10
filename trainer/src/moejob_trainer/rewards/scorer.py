"""All rewards of a job: completions are scored as they arrive, in batches of what is waiting."""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Any, Protocol, Self

from moejob_api.job.grpo import BuiltInReward, Reward, RewardFailure
from moejob_trainer.rewards.built_in import built_in
from moejob_trainer.rewards.completion import Completion, RewardFailed, Unreachable
from moejob_trainer.rewards.processes import WorkerProcess
from moejob_trainer.rewards.service import Service

# Batches of one reward at the same time.
WORKERS = 2


@dataclass(frozen=True, slots=True)
class Score:
    """The value of one completion, and of each reward its part. NaN where one has failed."""

    total: float
    parts: Mapping[str, float]


class Backend(Protocol):
    """Something that scores batches."""

    async def scores(self, completions: Sequence[Completion]) -> list[Any]:
        """Return a score for each; raises RewardFailed."""

    async def close(self) -> None:
        """End the processes and connections of rewards."""


class Scorer:
    """Scores completions with every reward. Used in `async with`."""

    def __init__(self, rewards: Sequence[Reward], failure: RewardFailure) -> None:
        self._rewards, self._failure = rewards, failure
        self.names = _names(rewards)
        # Of each reward, since this was last taken: how often it failed.
        self.failures: Counter[str] = Counter()
        self.last_failure: dict[str, str] = {}
        self._batched: list[_Batched] = []
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        await self._stack.__aenter__()
        for reward in self._rewards:
            self._batched.append(await self._stack.enter_async_context(_Batched(reward)))
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def score(self, completion: Completion) -> Score:
        """Return the score of a completion. Raises where a failed reward is to stop the run."""
        found = await asyncio.gather(*(batched.score(completion) for batched in self._batched), return_exceptions=True)
        parts = dict(zip(self.names, map(self._value, self.names, found), strict=True))
        total = math.fsum(reward.weight * part for reward, part in zip(self._rewards, parts.values(), strict=True))
        return Score(total, parts)

    def _value(self, name: str, found: float | BaseException) -> float:
        if isinstance(found, float):
            return found
        if not isinstance(found, RewardFailed):
            raise found
        self.failures[name] += 1
        self.last_failure[name] = str(found)
        if self._failure is RewardFailure.STOP:
            raise RewardFailed(f"reward {name} failed and grpo.rewardFailure is Stop: {found}")
        return math.nan


def _names(rewards: Sequence[Reward]) -> tuple[str, ...]:
    """Of each reward its own: the second of the same is named name-2."""
    seen: Counter[str] = Counter()
    names = []
    for reward in rewards:
        name = str(reward.name or reward.module or reward.url)
        seen[name] += 1
        names.append(name if seen[name] == 1 else f"{name}-{seen[name]}")
    return tuple(names)


class _Immediate:
    """Rewards that take microseconds and cannot hang need no process."""

    def __init__(self, reward: Reward) -> None:
        self._score = built_in(reward)

    async def scores(self, completions: Sequence[Completion]) -> list[Any]:
        return [self._score(completion) for completion in completions]

    async def close(self) -> None:
        """Nothing was started."""


def _backend(reward: Reward) -> Backend:
    if reward.url is not None:
        return Service(reward)
    if reward.name in (BuiltInReward.EXACT_MATCH, BuiltInReward.NUMERIC, BuiltInReward.LENGTH):
        return _Immediate(reward)
    return WorkerProcess(reward)


class _Batched:
    """One reward: what waits is scored together, by a few backends at a time."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        self._waiting: deque[tuple[Completion, asyncio.Future[float]]] = deque()
        self._changed = asyncio.Event()
        self._backends: list[Backend] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        for _ in range(WORKERS):
            backend = _backend(self._reward)
            self._backends.append(backend)
            self._tasks.append(asyncio.create_task(self._work(backend)))
        return self

    async def __aexit__(self, *error: object) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for backend in self._backends:
            await backend.close()

    async def score(self, completion: Completion) -> float:
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((completion, future))
        self._changed.set()
        return await future

    async def _work(self, backend: Backend) -> None:
        while True:
            await self._changed.wait()
            most = min(self._reward.batch_size, len(self._waiting))
            batch = [self._waiting.popleft() for _ in range(most)]
            if not self._waiting:
                self._changed.clear()
            if batch:
                await self._answer(backend, batch)

    async def _answer(self, backend: Backend, batch: Sequence[tuple[Completion, asyncio.Future[float]]]) -> None:
        try:
            values = await backend.scores([completion for completion, _ in batch])
            if len(values) != len(batch):
                raise RewardFailed(f"{len(values)} scores came for {len(batch)} completions")  # noqa: TRY301
        except Unreachable as failed:
            for _, future in batch:
                _fail(future, failed)
            return
        except RewardFailed as failed:
            await self._answer_alone(backend, batch, failed)
            return
        for (_, future), value in zip(batch, values, strict=True):
            _settle(future, value)

    async def _answer_alone(
        self, backend: Backend, batch: Sequence[tuple[Completion, asyncio.Future[float]]], failed: RewardFailed
    ) -> None:
        """One of a batch may be to blame for its failure; the others must not lose their groups for it."""
        if len(batch) == 1:
            _fail(batch[0][1], failed)
            return
        for one in batch:
            await self._answer(backend, [one])


def _settle(future: asyncio.Future[float], value: Any) -> None:
    if isinstance(value, int | float) and math.isfinite(value):
        if not future.done():
            future.set_result(float(value))
        return
    _fail(future, RewardFailed(f"it returned {value!r}, which is no finite number"))


def _fail(future: asyncio.Future[float], error: RewardFailed) -> None:
    # The one who asked may have given up.
    if not future.done():
        future.set_exception(error)
