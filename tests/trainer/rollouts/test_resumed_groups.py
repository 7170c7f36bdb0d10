"""Runs that generate ahead, killed again and again: no prompt is lost or trained on twice, in any layout.

The engine is a stand-in whose answers are never the same twice, so that a group that was asked for again is noticed.
The record of steps (`recordTokens`) says which groups each step took.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from moejob_api.contract.answers import AnswerRequest, EngineAnswer, WeightSpan
from moejob_api.contract.pods import Environment
from moejob_trainer.checkpoints.names import MARKER
from trainer.rollouts.recorded_groups import (
    SavedState,
    complete_checkpoints,
    read_groups,
    read_state,
    require_nothing_lost,
)
from trainer.rollouts.stand_in import StandIn
from trainer.runs import Runs, StartedRanks, await_result

pytestmark = pytest.mark.slow

STEPS, PROMPTS, MEMBERS = 10, 3, 2
# Some answers have no reward, so that steps leave groups out; the sum of an empty text is 0, and many are empty.
REWARDS = """
import zlib

def judge_letters(completions, **_):
    sums = [zlib.crc32(text.encode()) for text in completions]
    return [float("nan") if value % 40 == 1 else float(value % 2) for value in sums]
"""
ONE_RANK: Mapping[str, Any] = {}
TWO_RANKS: Mapping[str, Any] = {"parallelism": {"data": 2}, "resources": {"gpusPerNode": 2}}


@dataclass
class RandomEngine:
    """A stand-in for an engine, which takes its time: a tenth of all answers takes as long as a few steps."""

    server: StandIn = field(default_factory=StandIn)
    random: np.random.Generator = field(default_factory=np.random.default_rng)

    def __post_init__(self) -> None:
        self.server.behaviour = self.answer

    async def answer(self, request: AnswerRequest) -> web.Response:
        await asyncio.sleep(1.5 if self.random.random() < 0.1 else self.random.uniform(0, 0.2))
        count = int(self.random.integers(1, request.max_tokens))
        tokens = np.array([*self.random.integers(5, 40, count - 1), request.stop_tokens[0]], "<i4")
        answer = EngineAnswer(
            tokens=tokens.tobytes(),
            log_probabilities=(-self.random.random(count)).astype("<f4").tobytes(),
            spans=(WeightSpan(weights=self.server.version, start=0, end=count),),
            finish_reason="stop",
        )
        return web.Response(text=answer.model_dump_json())


@pytest.fixture
def engine() -> Iterator[RandomEngine]:
    made = RandomEngine()
    yield made
    made.server.close()


@dataclass
class AheadRun:
    """A run of one job over its starts."""

    runs: Runs
    engine: RandomEngine
    rewards: Path
    staleness: int
    attempts: int = 0

    @property
    def folder(self) -> Path:
        return self.runs.volume / "ahead"

    def start(self, layout: Mapping[str, Any]) -> StartedRanks:
        self.attempts += 1
        rollout = {
            "placement": "Separate",
            "sync": "Disk",
            "staleness": self.staleness,
            "probe": {"onMismatch": "Warn"},
        }
        return self.runs.start(
            "ahead",
            attempt=self.attempts,
            environ={Environment.ROLLOUT_URLS: self.engine.server.url},
            method="GRPO",
            data={"train": [{"source": "moejob/tiny-sums", "format": "Prompts"}]},
            training={"maxSteps": STEPS, "globalBatchSize": PROMPTS * MEMBERS},
            grpo={
                "groupSize": MEMBERS,
                "promptsPerStep": PROMPTS,
                "maxNewTokens": 8,
                "rewards": [{"module": "letters:judge_letters", "modulePath": str(self.rewards)}],
                "recordTokens": True,
                "rollout": rollout,
            },
            checkpoint={"everySteps": 1, "async": True, "keep": 1000},
            **layout,
        )

    def done_steps(self) -> int:
        log = self.folder / "steps.jsonl"
        lines = log.read_text().splitlines(keepends=True) if log.exists() else []
        return max((json.loads(line)["step"] for line in lines if line.endswith("\n")), default=0)


# When a run is killed, as a function of its steps so far.
Moment = Callable[[AheadRun, int], bool]


def has_half_checkpoint(run: AheadRun, before: int) -> bool:
    folders = (run.folder / "checkpoints").glob("step-*")
    return run.done_steps() > before and any(not (path / MARKER).exists() for path in folders)


def has_answers_in_flight(run: AheadRun, before: int) -> bool:
    return run.done_steps() > before and run.engine.server.in_flight > 0


def has_made_a_step(run: AheadRun, before: int) -> bool:
    return run.done_steps() > before + 1


def test_a_run_that_is_killed_again_and_again_takes_each_prompt_once_in_any_layout(
    engine: RandomEngine, tmp_path: Path
) -> None:
    (tmp_path / "letters.py").write_text(REWARDS)
    (tmp_path / "volume").mkdir()
    run = AheadRun(Runs(tmp_path / "volume"), engine, tmp_path, staleness=1)
    resumed_states: list[SavedState] = []
    moments: list[tuple[Mapping[str, Any], Moment]] = [
        (TWO_RANKS, has_answers_in_flight),
        (ONE_RANK, has_half_checkpoint),
        (TWO_RANKS, has_made_a_step),
    ]
    try:
        for layout, has_come in moments:
            started, before = run.start(layout), run.done_steps()
            await_result(lambda: has_come(run, before) or not started.is_running(), has_come.__name__)  # noqa: B023
            assert started.is_running(), started.read_log()
            started.kill()
            resumed_states += [read_state(path) for path in complete_checkpoints(run.folder)[-1:]]
        last = run.start(ONE_RANK)
        assert not any(last.await_exit_codes()), last.read_log()
    finally:
        run.runs.close()
    require_nothing_lost([run.folder], STEPS)
    contents = {group.number: group.contents for group in read_groups(run.folder, STEPS)}
    saved = {number: each for state in resumed_states for number, each in state.finished.items()}
    assert saved, "no checkpoint had a finished group: the test has tested nothing"
    # A group that was finished is trained on as it was, though the engine never answers the same again.
    assert {number: contents[number] for number in saved} == saved
