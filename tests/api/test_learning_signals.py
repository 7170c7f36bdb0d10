"""Signs that a run of GRPO learns nothing: what is one, and what it says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from builders import spec
from moejob_api.job.grpo import Grpo
from moejob_api.learning_signals import (
    SignalKind,
    reported_signals,
    signal_measures,
    signal_words,
    signals_text,
    weak_signals,
)

GRPO: dict[str, Any] = {"groupSize": 8, "promptsPerStep": 4, "maxNewTokens": 16, "rewards": [{"name": "math"}]}


@dataclass(frozen=True)
class Step:
    """A step of as many groups."""

    reward: float | None
    groups: float = 0
    flat_groups: float = 0
    cut_share: float = 0


def grpo(**fields: Any) -> Grpo:
    job = spec(method="GRPO", data={"train": [{"source": "pvc://a/b.jsonl", "format": "Prompts"}]}, grpo=GRPO | fields)
    assert job.grpo is not None
    return job.grpo


def steps(flat: Sequence[float], cut: float = 0.0, reward: Sequence[float] = (0.0,)) -> list[Step]:
    """Steps of 4 groups, with the number of those that have equal rewards."""
    rewards = [*reward, *[reward[-1]] * len(flat)]
    return [Step(rewards[number], 4, each, cut) for number, each in enumerate(flat)]


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
        pytest.param([Step(None)] * 9, [], id="no rewards"),
        pytest.param([], [], id="no steps"),
    ],
)
def test_signs_are_seen_in_the_last_steps(lines: list[Step], kinds: list[SignalKind]) -> None:
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
    assert signal_words(Step(None)) == []


@pytest.mark.parametrize("kinds", [(), (SignalKind.FLAT,), (SignalKind.CUT,), tuple(SignalKind)])
def test_a_report_has_the_signs(kinds: tuple[SignalKind, ...]) -> None:
    assert reported_signals({"loss": 1.0, **signal_measures(kinds)}) == kinds


def test_before_it_is_known_a_report_says_nothing_of_signs() -> None:
    assert signal_measures(None) == {}
    assert reported_signals({"loss": 1.0}) is None


def test_a_sign_that_is_unknown_here_is_left_out() -> None:
    assert reported_signals({"weakSignals": 1.0, "weakSignal/other": 1.0}) == ()


def test_the_sentence_names_each_sign() -> None:
    assert signals_text(tuple(SignalKind)).count("at least half") == 2
