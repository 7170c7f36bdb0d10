"""The process of a reward meets every signal in every phase: completions settle, and the next process scores again."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from moejob_api.job.grpo import Reward, RewardFailure
from moejob_trainer.errors import TransientFailure
from moejob_trainer.rewards.completion import Completion
from moejob_trainer.rewards.scorer import Scorer
from trainer.rows import make_rows

FOLDER = str(Path(__file__).parent)
# An import takes three seconds; on a busy machine the interpreter takes longer.
START_SECONDS, SCORE_SECONDS = 20, 6
LONGEST_SECONDS = 120
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGSTOP)


def build_scorer(module: str, **limits: Any) -> Scorer:
    reward = {"module": module, "modulePath": FOLDER, "concurrency": 1, "timeoutSeconds": SCORE_SECONDS, **limits}
    return Scorer([Reward.model_validate(reward)], RewardFailure.DROP_GROUP)


def worker_pids() -> Iterator[int]:
    """Yield the processes of rewards that this process has started."""
    for children in Path("/proc/self/task").glob("*/children"):
        for pid in map(int, children.read_text().split()):
            if b"moejob_trainer.rewards.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                yield pid


def signal_worker(number: signal.Signals) -> None:
    # For a moment after its fork a child has the command line of this process.
    until = time.monotonic() + START_SECONDS
    while not (pids := [*worker_pids()]) and time.monotonic() < until:
        time.sleep(0.01)
    [pid] = pids
    os.kill(pid, number)


async def score(scorer: Scorer, text: str = "good") -> float:
    return (await scorer.score_completion(Completion("1 + 1", text, 1, 10))).total


@pytest.mark.parametrize("number", make_rows(SIGNALS, [signal.SIGKILL]), ids=lambda number: number.name)
def test_a_process_that_is_hit_while_it_waits_costs_no_more_than_one_answer(number: signal.Signals) -> None:
    async def act() -> tuple[float, float]:
        async with asyncio.timeout(LONGEST_SECONDS), build_scorer("strange_rewards:by_name") as scorer:
            assert await score(scorer) == 1.0
            signal_worker(number)
            return await score(scorer), await score(scorer)

    hit, following = asyncio.run(act())
    assert hit == 1.0 or math.isnan(hit)
    assert following == 1.0


@pytest.mark.parametrize("number", make_rows(SIGNALS, [signal.SIGSTOP]), ids=lambda number: number.name)
def test_a_process_that_is_hit_while_it_scores_loses_its_answer_alone(number: signal.Signals) -> None:
    async def act() -> tuple[float, float]:
        async with asyncio.timeout(LONGEST_SECONDS), build_scorer("strange_rewards:by_name") as scorer:
            assert await score(scorer) == 1.0
            hanging = asyncio.create_task(score(scorer, "hang"))
            await asyncio.sleep(0.5)
            signal_worker(number)
            return await hanging, await score(scorer)

    hit, following = asyncio.run(act())
    assert math.isnan(hit)
    assert following == 1.0


@pytest.mark.parametrize("number", SIGNALS[:2], ids=lambda number: number.name)
def test_a_process_that_is_killed_while_it_imports_does_not_end_the_job(number: signal.Signals) -> None:
    async def act() -> float:
        async with asyncio.timeout(LONGEST_SECONDS), build_scorer("slow_import:f") as scorer:
            signal_worker(number)
            with pytest.raises(TransientFailure, match=f"process killed.*of {number.name}"):
                await scorer.wait_until_ready()
            await scorer.wait_until_ready()
            return await score(scorer)

    assert asyncio.run(act()) == 1.0


@pytest.mark.thorough
def test_a_process_that_is_stopped_while_it_imports_is_replaced() -> None:
    async def act() -> float:
        scorer = build_scorer("slow_import:f", startTimeoutSeconds=START_SECONDS)
        async with asyncio.timeout(LONGEST_SECONDS), scorer:
            signal_worker(signal.SIGSTOP)
            assert math.isnan(await score(scorer))
            return await score(scorer)

    assert asyncio.run(act()) == 1.0
