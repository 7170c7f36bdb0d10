"""A GRPO run that learns nothing says so: once while it runs, and at its end, with what to change."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from cli.runs import Act, Run
from moejob_api.learning_signals import WINDOW_STEPS

GRPO: dict[str, Any] = {
    "groupSize": 8,
    "promptsPerStep": 4,
    "maxNewTokens": 16,
    "rewards": [{"name": "math"}],
    "rollout": {"placement": "Separate", "sync": "Disk"},
}
# It waits, as an engine does that is asked nothing.
ENGINE = "#!/bin/bash\ntrap 'kill %1; exit 0' TERM\nsleep 1000 &\nwait\n"


def test_a_run_says_it_once_while_it_runs_and_again_at_its_end(run: Callable[..., Run], tmp_path: Path) -> None:
    engine = tmp_path / "engine"
    engine.write_text(ENGINE)
    engine.chmod(0o755)
    data = {"train": [{"source": "moejob/tiny-sums", "format": "Prompts"}], "maxLength": 64}
    job = run(method="GRPO", data=data, grpo=GRPO, training={"maxSteps": 4, "globalBatchSize": None})
    flat: list[Act] = [["rewards", 3, 4, 0.94]] * (WINDOW_STEPS + 2)
    ended = job.run([[*flat, ["was_heard"], ["ends", 0]]], MOEJOB_ROLLOUT_PYTHON=str(engine))
    assert ended.code == 0, ended
    lines = ended.stdout.splitlines()
    notes = [line for line in lines if line.startswith("note: ")]
    assert len(notes) == 2
    assert "from which nothing is learned" in notes[0]
    assert "were cut off" in notes[1]
    at_the_end = lines[lines.index(next(line for line in lines if line.startswith("  reward"))) :]
    assert [line for line in at_the_end if line.startswith("  note ") and ("learned" in line or "cut off" in line)]
    assert any("3 of 4 groups of equal reward, 94% cut off" in line for line in lines)
