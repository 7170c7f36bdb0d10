"""A pod's answer is foreign text: it is bounded and made printable where it is read."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from moejob_api.contract.pods import (
    PodOutcome,
    PodProgress,
    RankFault,
    RunPhase,
    TerminationMessage,
    engine_ends_text,
    escaped_lines,
    parse_engine_ends,
    parse_phase,
    phase_text,
    printable_text,
)


@pytest.mark.parametrize(
    ("said", "shown"),
    [
        pytest.param("loss is nan", "loss is nan", id="plain"),
        pytest.param("\x1b[2J\x1b]0;owned\x07", " [2J ]0;owned ", id="terminal escapes"),
        pytest.param("a\r\nb\tc", "a  b c", id="line ends and tabs"),
        pytest.param("\u202egnirts\u2066", " gnirts ", id="direction of writing"),
        pytest.param("\x9b31m", " 31m", id="escapes in one character"),
        pytest.param("Größe 大 \U0001f600", "Größe 大 \U0001f600", id="other scripts"),
    ],
)
def test_words_reach_terminals_without_what_terminals_obey(said: str, shown: str) -> None:
    assert printable_text(said) == shown
    word = TerminationMessage.model_validate_json(json.dumps({"outcome": "Hung", "message": said}))
    assert word.message == RankFault(outcome=PodOutcome.HUNG, message=said).message == shown


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        pytest.param("a\tb\nc", "a\tb\nc", id="lines and tabs"),
        pytest.param("\x1b[2J\x9b31m\x00", r"\x1b[2J\x9b31m\x00", id="terminal escapes"),
        pytest.param("\u202egnirts\u2066", r"\u202egnirts\u2066", id="direction of writing"),
        pytest.param("a\ud800b\u2028", r"a\ud800b\u2028", id="half of a pair, separator of lines"),
        pytest.param("Größe 大 \U0001f600", "Größe 大 \U0001f600", id="other scripts"),
    ],
)
def test_what_terminals_obey_is_escaped_in_lines(text: str, shown: str) -> None:
    assert escaped_lines(text) == shown


@given(st.text())
def test_words_stay_as_long_and_are_printable_ever_after(said: str) -> None:
    shown = printable_text(said)
    assert len(shown) == len(said)
    assert printable_text(shown) == shown


@pytest.mark.parametrize("phase", RunPhase)
def test_a_phase_is_read_as_it_was_written(phase: RunPhase) -> None:
    assert parse_phase(phase_text(phase)) == (phase, None)
    assert parse_phase(phase_text(phase, 0.437)) == (phase, 43)
    assert len(phase_text(phase, 1.0)) <= 64


@pytest.mark.parametrize(("share", "percentage"), [(-1.0, 0), (0.0, 0), (0.999, 99), (1.0, 100), (7.0, 100)])
def test_a_share_is_rounded_down_within_its_bounds(share: float, percentage: int) -> None:
    assert parse_phase(phase_text(RunPhase.RESTORING, share)) == (RunPhase.RESTORING, percentage)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "dancing",
        "stepping: 43",
        "stepping: 101 %",
        "stepping: -1 %",
        "stepping: 4.5 %",
        "stepping: 43 % more",
        f"stepping: {'9' * 40} %",
        "stepping: \N{ARABIC-INDIC DIGIT THREE} %",
        "Stepping: 43 %",
    ],
)
def test_what_is_no_phase_is_none(text: str) -> None:
    assert parse_phase(text) is None


@pytest.mark.parametrize(
    ("ends", "expected"),
    [
        pytest.param({}, "", id="no engines"),
        pytest.param({0: 0, 1: 0}, "", id="none has ended"),
        pytest.param({0: 0, 1: 1}, "engine 1 has ended once", id="one"),
        pytest.param({3: 2, 4: 7}, "engine 4 has ended 7 times", id="most often"),
    ],
)
def test_a_phase_names_the_engine_that_ends_again_and_again(ends: dict[int, int], expected: str) -> None:
    assert engine_ends_text(ends) == expected
    text = f"{RunPhase.AWAITING_ENGINES}: {expected}" if expected else phase_text(RunPhase.AWAITING_ENGINES)
    assert parse_phase(text) == (RunPhase.AWAITING_ENGINES, None)
    assert parse_engine_ends(text) == expected


def test_no_other_words_are_ends_of_engines() -> None:
    assert parse_engine_ends("waiting for engines: engine 0 has won 7 times") == ""
    assert parse_engine_ends(phase_text(RunPhase.RESTORING, 0.5)) == ""


HUGE = 10**400


@pytest.mark.parametrize(
    "said",
    [
        pytest.param({"attempt": HUGE}, id="attempt"),
        pytest.param({"restarts": HUGE}, id="restarts"),
        pytest.param({"run": {"step": HUGE}}, id="step"),
        pytest.param({"run": {"step": 1, "totalSteps": 2**31}}, id="total steps"),
        pytest.param({"run": {"step": 1, "lastCheckpointStep": HUGE}}, id="checkpoint"),
        pytest.param({"run": {"step": 1, "saveSeconds": 1e300}}, id="seconds of a save"),
        pytest.param({"run": {"step": 1, "loss": HUGE}}, id="loss"),
        pytest.param({"run": {"step": 1, "epoch": 1e300}}, id="epoch"),
        pytest.param({"ranks": [{"rank": HUGE, "pid": 1, "step": 1, "ageSeconds": 1.0}]}, id="rank"),
        pytest.param({"ranks": [{"rank": 0, "pid": 1, "step": 1, "ageSeconds": 1e300}]}, id="age"),
        pytest.param({"fault": {"outcome": "Hung", "exitCode": -HUGE}}, id="exit code"),
    ],
)
def test_absurd_numbers_are_a_refused_message(said: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        PodProgress.model_validate_json(json.dumps({"attempt": 1, "index": 0, **said}))


@pytest.mark.parametrize(
    "commit",
    [
        pytest.param({"kind": "space", "name": "a/b", "commit": "a" * 40}, id="kind"),
        pytest.param({"kind": "model", "name": "a\u001b[2J", "commit": "a" * 40}, id="name"),
        pytest.param({"kind": "model", "name": "a" * 257, "commit": "a" * 40}, id="length"),
        pytest.param({"kind": "model", "name": "a/b", "commit": "main"}, id="commit"),
    ],
)
def test_what_is_no_commit_of_the_hub_is_a_refused_message(commit: dict[str, str]) -> None:
    said = {"attempt": 1, "index": 0, "run": {"step": 1, "hubCommits": [commit]}}
    with pytest.raises(ValidationError):
        PodProgress.model_validate_json(json.dumps(said))


def test_a_run_that_diverges_still_reports() -> None:
    said = {"attempt": 1, "index": 0, "run": {"step": 1, "loss": 3.4e38, "gradientNorm": 3.4e38}}
    assert PodProgress.model_validate_json(json.dumps(said)).run is not None
