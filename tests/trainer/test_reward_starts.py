"""Runs whose rewards cannot work end before anything is asked of an engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from moejob_api.contract.pods import Environment, ExitCode
from ports import free_port
from trainer.runs import Runs

FOLDER = str(Path(__file__).parent / "rewards")


@pytest.mark.parametrize(
    ("reward", "code", "says"),
    [
        pytest.param(
            {"module": "fails_at_import:f"},
            ExitCode.BAD_CONFIGURATION,
            "No module named 'not_in_any_image' [" + FOLDER + "/fails_at_import.py:",
            id="import",
        ),
        pytest.param(
            {"module": "strange_rewards:no_list"},
            ExitCode.BAD_CONFIGURATION,
            "failed for a made-up answer to the first prompt (wrong type): it returned 1.0",
            id="return value",
        ),
    ],
)
def test_a_reward_that_cannot_work_ends_the_run_without_an_engine(
    reward: dict[str, Any], code: int, says: str, tmp_path: Path
) -> None:
    runs = Runs(tmp_path)
    try:
        run = runs.start(
            "job",
            environ={
                # No engine is there: a run that waited for one would wait for half an hour.
                Environment.ROLLOUT_URLS: f"http://127.0.0.1:{free_port()}",
                Environment.SECRET: "a secret",
                Environment.HOST: "127.0.0.1",
            },
            method="GRPO",
            data={"train": [{"source": "moejob/tiny-sums", "format": "Prompts"}]},
            training={"maxSteps": 2, "globalBatchSize": 16},
            grpo={
                "groupSize": 4,
                "promptsPerStep": 4,
                "maxNewTokens": 8,
                "rewards": [reward | {"modulePath": FOLDER}],
                "rollout": {"placement": "Separate", "sync": "Gloo"},
            },
        )
        assert code in run.await_exit_codes()
        assert says in run.read_log()
    finally:
        runs.close()
