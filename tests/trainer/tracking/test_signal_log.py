"""Rank 0 warns in its log, once, that a run of GRPO learns nothing."""

from __future__ import annotations

import math

import pytest

from builders import spec
from moejob_api.learning_signals import WINDOW_STEPS, SignalKind, reported_signals
from moejob_trainer.tracking.signal_log import SignalLog

DATA = {"train": [{"source": "pvc://a/b.jsonl", "format": "Prompts"}]}
GRPO = spec(method="GRPO", data=DATA, grpo={"groupSize": 8, "promptsPerStep": 4, "rewards": [{"name": "math"}]}).grpo
FLAT = {"reward": 0.0, "groups": 4.0, "groupsWithoutSignal": 3.0, "truncated": 0.94}


def test_each_sign_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    signals = SignalLog(GRPO)
    for _ in range(WINDOW_STEPS - 1):
        signals.note_step(FLAT)
    assert caplog.messages == []
    for _ in range(3 * WINDOW_STEPS):
        signals.note_step(FLAT)
    assert len(caplog.messages) == 2
    assert "15 of 20 groups of the last 5 steps" in caplog.messages[0]
    assert "94% of the answers" in caplog.messages[1]


def test_a_reward_that_has_risen_since_the_first_steps_is_no_sign(caplog: pytest.LogCaptureFixture) -> None:
    signals = SignalLog(GRPO)
    for number in range(10 * WINDOW_STEPS):
        is_late = number >= WINDOW_STEPS
        signals.note_step(
            {"reward": float(is_late), "groups": 4.0, "groupsWithoutSignal": 4.0 * is_late, "truncated": 0.0}
        )
    assert caplog.messages == []


@pytest.mark.parametrize(
    ("grpo", "line"),
    [
        pytest.param(None, FLAT, id="another method"),
        pytest.param(GRPO, {"reward": math.nan, "groups": 0.0, "truncated": math.nan}, id="no group is left"),
    ],
)
def test_nothing_is_said_without_rewards(
    grpo: object, line: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    signals = SignalLog(grpo)  # type: ignore[arg-type]
    for _ in range(2 * WINDOW_STEPS):
        signals.note_step(line)
    assert caplog.messages == []


def test_a_sign_is_reported_until_it_was_absent_for_several_steps() -> None:
    signals = SignalLog(GRPO)
    sound = FLAT | {"groupsWithoutSignal": 1.0, "truncated": 0.1}
    reports = [reported_signals(signals.note_step(line)) for line in [FLAT] * 5 + [sound] * 9]
    assert reports[:4] == [None] * 4
    assert reports[4] == (SignalKind.FLAT, SignalKind.CUT)
    # Over five steps half of the groups are flat until the second sound step; four steps later that is not forgotten.
    assert reports[10] == (SignalKind.FLAT, SignalKind.CUT)
    assert reports[-1] == ()
