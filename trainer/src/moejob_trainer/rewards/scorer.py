"""All rewards of a job: the scorer takes the completions that wait as one batch, as soon as they arrive.

Every completion gets a score or a failure, even if a backend breaks: rank 0 would wait for a missing score, and all
other ranks for rank 0.
"""

from __future__ import annotations

import asyncio
import math
import os
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

from moejob_api.job.grpo import BuiltInReward, Reward, RewardFailure
from moejob_trainer.errors import BadConfiguration, TransientFailure
from moejob_trainer.rewards.built_in import built_in_score
from moejob_trainer.rewards.completion import (
    BATCH_FAILURES,
    FINAL_FAILURES,
    PASSING_FAILURES,
    Completion,
    FailureKind,
    RewardFailed,
)
from moejob_trainer.rewards.functions import validate_scores
from moejob_trainer.rewards.processes import WorkerProcess
from moejob_trainer.rewards.service import RewardService, redacted_url

# After a batch has failed, each of its completions is scored alone, for this many times timeoutSeconds in all.
ALONE_TIMEOUTS = 3

_WaitingCompletion = tuple[Completion, asyncio.Future[float]]


@dataclass(frozen=True, slots=True)
class CompletionScore:
    """The total score of one completion and the score of each reward; NaN where a reward failed."""

    total: float
    parts: Mapping[str, float]


class RewardBackend(Protocol):
    """A scorer of batches: a process, a service, or a function of this process."""

    async def start(self) -> None:
        """Start processes, without waiting until they are ready."""

    async def wait_until_ready(self) -> None:
        """Wait until it can score; raises RewardFailed."""

    async def score_batch(self, completions: Sequence[Completion]) -> Sequence[object]:
        """Return a score for each; raises RewardFailed."""

    async def close(self) -> None:
        """End the processes and connections of rewards."""


class Scorer:
    """Scores completions with every reward. Used in `async with`; entering and leaving twice is as once."""

    def __init__(self, rewards: Sequence[Reward], failure: RewardFailure) -> None:
        self._rewards, self._failure = rewards, failure
        self.names = reward_names(rewards)
        # Failures of each reward since they were last forgotten, and their kinds.
        self.failures: Counter[str] = Counter()
        self.kinds: dict[str, Counter[FailureKind]] = {}
        self.last_failure: dict[str, str] = {}
        self._batched_rewards: list[_BatchedReward] = []

    async def __aenter__(self) -> Self:
        if not self._batched_rewards:
            self._batched_rewards = [_BatchedReward(reward) for reward in self._rewards]
            for batched in self._batched_rewards:
                await batched.start()
        return self

    async def __aexit__(self, *error: object) -> None:
        for batched in self._batched_rewards:
            await batched.close()
        self._batched_rewards = []

    @property
    def is_started(self) -> bool:
        """Return whether there is something to end."""
        return bool(self._batched_rewards)

    async def wait_until_ready(self) -> None:
        """Wait until every reward can score; BadConfiguration where a reward cannot start, unless it was killed."""
        outcomes = await asyncio.gather(
            *(batched.wait_until_ready() for batched in self._batched_rewards), return_exceptions=True
        )
        for name, outcome in zip(self.names, outcomes, strict=True):
            if isinstance(outcome, RewardFailed):
                error = TransientFailure if outcome.kind is FailureKind.KILLED else BadConfiguration
                raise error(f"reward {name} cannot start ({outcome.kind}): {outcome}") from outcome
            if outcome is not None:
                raise outcome

    def forget_failures(self) -> None:
        """Count failures from 0 again."""
        self.failures.clear()
        self.kinds.clear()

    def no_groups_error(self, dropped_groups: str) -> Exception:
        """Return the error for a step in which failed rewards have left no group."""
        reasons = "; ".join(f"{name}: {reason}" for name, reason in self.last_failure.items())
        message = f"{dropped_groups} was dropped for a failed reward ({reasons})"
        kinds = {kind for counts in self.kinds.values() for kind in counts}
        return TransientFailure(message) if kinds & PASSING_FAILURES else BadConfiguration(message)

    async def try_completion(self, completion: Completion) -> dict[str, RewardFailed]:
        """Return the failures by the name of the reward, for a completion that belongs to no step."""
        outcomes = await asyncio.gather(
            *(batched.score_completion(completion) for batched in self._batched_rewards), return_exceptions=True
        )
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, RewardFailed):
                raise outcome
        pairs = zip(self.names, outcomes, strict=True)
        return {name: outcome for name, outcome in pairs if isinstance(outcome, RewardFailed)}

    async def score_completion(self, completion: Completion) -> CompletionScore:
        """Return the score of a completion. Raises where a failed reward is to stop the run."""
        outcomes = await asyncio.gather(
            *(batched.score_completion(completion) for batched in self._batched_rewards), return_exceptions=True
        )
        parts = dict(zip(self.names, map(self._resolve_outcome, self.names, outcomes), strict=True))
        total = math.fsum(reward.weight * part for reward, part in zip(self._rewards, parts.values(), strict=True))
        return CompletionScore(total, parts)

    def _resolve_outcome(self, name: str, outcome: float | BaseException) -> float:
        if isinstance(outcome, float):
            return outcome
        if not isinstance(outcome, RewardFailed):
            raise outcome
        text = f"{outcome.kind}: {outcome}"
        self.failures[name] += 1
        self.kinds.setdefault(name, Counter())[outcome.kind] += 1
        self.last_failure[name] = text
        if outcome.kind is FailureKind.AWAY:
            raise TransientFailure(f"reward {name} failed ({text}); the run is tried again")
        if outcome.kind in FINAL_FAILURES:
            raise BadConfiguration(f"reward {name} failed, and would again ({text})")
        if self._failure is RewardFailure.STOP:
            raise BadConfiguration(f"reward {name} failed and grpo.rewardFailure is Stop ({text})")
        return math.nan


def reward_names(rewards: Sequence[Reward]) -> tuple[str, ...]:
    """Return the name of each reward in metrics and logs: the second of the same is named name-2."""
    name_counts: Counter[str] = Counter()
    names = []
    for reward in rewards:
        name = str(reward.metric_name or reward.name or reward.module or redacted_url(reward.url or ""))
        name_counts[name] += 1
        names.append(name if name_counts[name] == 1 else f"{name}-{name_counts[name]}")
    return tuple(names)


class _ImmediateReward:
    """Rewards that take microseconds and cannot hang need no process."""

    def __init__(self, reward: Reward) -> None:
        self._score_function = built_in_score(reward)

    async def start(self) -> None:
        """Start nothing: scores are computed in this process."""

    async def wait_until_ready(self) -> None:
        """Wait for nothing: no process has to import the reward."""

    async def score_batch(self, completions: Sequence[Completion]) -> Sequence[object]:
        return [self._score_function(completion) for completion in completions]

    async def close(self) -> None:
        """Nothing was started."""


def _build_backend(reward: Reward) -> RewardBackend:
    if reward.url is not None:
        return RewardService(reward, os.environ)
    if reward.name in (BuiltInReward.EXACT_MATCH, BuiltInReward.NUMERIC, BuiltInReward.LENGTH):
        return _ImmediateReward(reward)
    return WorkerProcess(reward)


class _BatchedReward:
    """One reward: completions that wait are scored together, by a few backends at a time."""

    def __init__(self, reward: Reward) -> None:
        self._reward = reward
        # A built-in reward scores one answer in milliseconds, and a batch would die with the worst of its answers.
        self._most_completions = 1 if reward.name is not None else reward.batch_size
        self._waiting: deque[_WaitingCompletion] = deque()
        self._changed = asyncio.Event()
        self._backends: list[RewardBackend] = []
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Start the backends, which may take a while to be ready."""
        try:
            self._backends = [_build_backend(self._reward) for _ in range(self._reward.concurrency)]
        except RewardFailed as failure:
            raise BadConfiguration(f"reward {reward_names([self._reward])[0]} ({failure.kind}): {failure}") from failure
        for backend in self._backends:
            await backend.start()
            self._tasks.append(asyncio.create_task(self._run_backend(backend)))

    async def wait_until_ready(self) -> None:
        """Wait for the first backend: the others import the same."""
        await self._backends[0].wait_until_ready()

    async def close(self) -> None:
        """End the backends, and cancel the completions that still wait."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for backend in self._backends:
            await backend.close()
        for _, future in self._waiting:
            future.cancel()

    async def score_completion(self, completion: Completion) -> float:
        future: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        self._waiting.append((completion, future))
        self._changed.set()
        return await future

    async def _run_backend(self, backend: RewardBackend) -> None:
        while True:
            await self._changed.wait()
            size = min(self._most_completions, len(self._waiting))
            batch = [self._waiting.popleft() for _ in range(size)]
            if not self._waiting:
                self._changed.clear()
            if batch:
                await self._settle_batch(backend, batch)

    async def _settle_batch(self, backend: RewardBackend, batch: Sequence[_WaitingCompletion]) -> None:
        """Give every future of the batch a score or a failure; any other exception ends the run as a bug."""
        try:
            failure = await self._score_batch(backend, batch)
            if failure is not None:
                await self._settle_alone(backend, batch, failure)
        except Exception as error:  # noqa: BLE001 an error that ended this task would leave its futures waiting
            for _, future in batch:
                _fail_future(future, error)
        finally:
            for _, future in batch:
                future.cancel()

    async def _score_batch(self, backend: RewardBackend, batch: Sequence[_WaitingCompletion]) -> RewardFailed | None:
        """Return the failure of a batch, None where each future has its score."""
        try:
            returned = await backend.score_batch([completion for completion, _ in batch])
            values = validate_scores(returned, len(batch))
        except RewardFailed as failure:
            return failure
        for (_, future), value in zip(batch, values, strict=True):
            if not future.done():
                future.set_result(value)
        return None

    async def _settle_alone(
        self, backend: RewardBackend, batch: Sequence[_WaitingCompletion], failure: RewardFailed
    ) -> None:
        """Score each completion alone: one may have caused the failure, and must not cost the others their groups."""
        deadline = time.monotonic() + ALONE_TIMEOUTS * self._reward.timeout_seconds
        is_common = len(batch) == 1 or failure.kind in BATCH_FAILURES
        for waiting in batch:
            if not is_common and time.monotonic() < deadline:
                single_failure = await self._score_batch(backend, [waiting])
                failure = failure if single_failure is None else single_failure
                is_common = failure.kind in BATCH_FAILURES
            elif not is_common:
                message = f"others of its batch took all the time that it had, {self._reward.timeout_seconds} s and "
                message += f"{ALONE_TIMEOUTS} times that: {failure}"
                _fail_future(waiting[1], RewardFailed(failure.kind, message))
            # An exception for each: every future that raises one adds to its traceback.
            _fail_future(waiting[1], RewardFailed(failure.kind, str(failure)))


def _fail_future(future: asyncio.Future[float], error: Exception) -> None:
    # A caller that gave up has cancelled its future.
    if not future.done():
        future.set_exception(error)
