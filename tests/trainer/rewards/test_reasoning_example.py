"""The example of a reward that needs a package, with the package, in the process that a job starts."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moejob_api.job.grpo import Reward, RewardFailure
from moejob_trainer.rewards.completion import Completion
from moejob_trainer.rewards.scorer import Scorer
from real_models import real_packages
from reasoning_tasks import ABSENT

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the processes of rewards find reasoning-gym, as a variable of a job does; what has no wheel is left out."""
    for name in ABSENT:
        (tmp_path / f"{name}.py").touch()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(real_packages()), str(tmp_path)]))


@pytest.mark.usefixtures("packages")
def test_the_example_makes_prompts_and_scores_their_answers() -> None:
    command = [sys.executable, str(EXAMPLES / "reasoning_reward.py"), "basic_arithmetic", "4"]
    written = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    records: list[dict[str, Any]] = [json.loads(line) for line in written.splitlines()]
    reward = Reward(module="reasoning_reward:score", module_path=str(EXAMPLES), timeout_seconds=240)

    async def scored() -> list[float]:
        async with Scorer([reward], RewardFailure.STOP) as scorer:
            texts = [f"It is {record['answer']}" if number % 2 else "9 apples" for number, record in enumerate(records)]
            completions = [
                Completion("?", text, 1, 9, {name: record[name] for name in ("task", "entry")})
                for text, record in zip(texts, records, strict=True)
            ]
            return [score.total for score in await asyncio.gather(*map(scorer.score_completion, completions))]

    assert asyncio.run(scored()) == [0, 1, 0, 1]
