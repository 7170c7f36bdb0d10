"""A GRPO run that learns nothing says so: once while it runs, and at its end, with what to change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from builders import spec
from cli.runs import Act, Run
from moejob_api.job.grpo import Grpo
from moejob_cli.running.learning_signals import WINDOW_STEPS, SignalKind, signal_words, weak_signals
from moejob_cli.running.steps import StepLine

GRPO: dict[str, Any] = {
    "groupSize": 8,
    "promptsPerStep": 4,
    "maxNewTokens": 16,
    "rewards": [{"name": "math"}],
    "rollout": {"placement": "Separate", "sync": "Disk"},
}
# It waits, as an engine does that is asked nothing.
ENGINE = "#!/bin/bash\ntrap 'kill %1; exit 0' TERM\nsleep 1000 &\nwait\n"


def grpo(**fields: Any) -> Grpo:
    job = spec(method="GRPO", data={"train": [{"source": "pvc://a/b.jsonl", "format": "Prompts"}]}, grpo=GRPO | fields)
    assert job.grpo is not None
    return job.grpo


def steps(flat: Sequence[float], cut: float = 0.0, reward: Sequence[float] = (0.0,)) -> list[StepLine]:
    """Steps of 4 groups, with the number of those that have equal rewards."""
    rewards = [*reward, *[reward[-1]] * len(flat)]
    lines = (
        {
            "step": number,
            "loss": 0.0,
            "reward": rewards[number - 1],
            "groups": 4,
            "groupsWithoutSignal": each,
            "truncated": cut,
        }
        for number, each in enumerate(flat, start=1)
    )
    return [StepLine.model_validate(line) for line in lines]


@pytest.mark.parametrize(
    ("lines", "kinds"),
    [
        pytest.param(steps([3] * 5), [SignalKind.FLAT], id="three of four groups are flat"),
        pytest.param(steps([3] * 5, cut=0.94), [SignalKind.FLAT, SignalKind.CUT], id="and most answers are cut off"),
        pytest.param(steps([2] * 5), [SignalKind.FLAT], id="half of the groups are flat"),
        pytest.param(steps([2, 2, 2, 2, 1]), [], id="fewer than half"),
        pytest.param(steps([4] * 4), [], id="too few steps to say"),
        pytest.param(steps([4, 4, 4, 4, 4, 0, 0, 0, 0, 0]), [], id="the last steps count"),
        pytest.param(steps([0] * 5 + [4] * 5, reward=[0.2] * 5 + [1.0] * 5), [], id="equal because all are right"),
        pytest.param(
            steps([0] * 5 + [4] * 5, reward=[0.2] * 5 + [0.0] * 5), [SignalKind.FLAT], id="equal because none is"
        ),
        pytest.param(steps([0] * 5, cut=0.5), [SignalKind.CUT], id="half are cut off"),
        pytest.param(steps([0] * 5, cut=0.49), [], id="fewer are cut off"),
        pytest.param([StepLine(step=number, loss=1.0) for number in range(9)], [], id="no rewards"),
        pytest.param([], [], id="no steps"),
    ],
)
def test_signs_are_seen_in_the_last_steps(lines: list[StepLine], kinds: list[SignalKind]) -> None:
    assert [signal.kind for signal in weak_signals(lines, grpo())] == kinds


def test_a_sign_says_its_numbers_and_what_to_change() -> None:
    flat, cut = weak_signals(steps([3] * 9, cut=0.94, reward=[0.03125]), grpo())
    assert "15 of 20 groups of the last 5 steps" in flat.message
    assert "(mean 0.03125)" in flat.message
    assert "grpo.groupSize 16" in flat.message
    assert "grpo.dynamicSampling replaces such groups" in flat.message
    assert "94% of the answers of the last 5 steps were cut off at grpo.maxNewTokens 16" in cut.message
    [replaced] = weak_signals(steps([3] * 5), grpo(dynamicSampling={}))
    assert "dynamicSampling" not in replaced.message


def test_a_step_shows_it_beside_its_reward() -> None:
    assert signal_words(steps([3], cut=0.94)[0]) == ["3 of 4 groups of equal reward", "94% cut off"]
    assert signal_words(steps([1], cut=0.1)[0]) == []
    assert signal_words(StepLine(step=1, loss=1.0)) == []


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
