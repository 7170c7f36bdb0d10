"""Flags, variables, defaults, and what does not go together."""

from __future__ import annotations

import pytest

from moejob_operator.runtime.leader_election import LeaseDurations
from moejob_operator.runtime.settings import read_settings, unique_identity


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEJOB_OPERATOR_IDENTITY", "replica-1")


def test_without_a_word_everything_is_set() -> None:
    found = read_settings([])
    assert found.namespaces == ()
    assert found.lease_durations == LeaseDurations()
    assert found.webhook_certificates == "SelfSigned"


def test_a_flag_wins_over_a_variable_and_a_variable_over_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEJOB_OPERATOR_WORKERS", "3")
    monkeypatch.setenv("MOEJOB_OPERATOR_HTTP_PORT", "1234")
    found = read_settings(["--http-port", "4321"])
    assert (found.workers, found.http_port, found.identity) == (3, 4321, "replica-1")


def test_an_empty_variable_is_as_if_it_were_not_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEJOB_OPERATOR_NAMESPACES", "")
    assert read_settings([]).namespaces == ()


def test_several_namespaces_are_a_list_of_json_in_a_variable_and_one_flag_each(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MOEJOB_OPERATOR_NAMESPACES", '["team-a", "team-b"]')
    assert read_settings([]).namespaces == ("team-a", "team-b")
    assert read_settings(["--namespaces", "team-c", "--namespaces=team-d"]).namespaces == ("team-c", "team-d")


def test_switches_and_choices_are_given_as_flags() -> None:
    found = read_settings(
        ["--no-webhook", "--no-leader-election", "--log-format=Text", "--webhook-certificates", "CertManager"]
    )
    assert (found.webhook, found.leader_election) == (False, False)
    assert (found.log_format, found.webhook_certificates) == ("Text", "CertManager")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        pytest.param(["--nonsense", "1"], "nonsense", id="an unknown flag"),
        pytest.param(["--workers", "many"], "--workers", id="a word for a number"),
        pytest.param(["--workers", "0"], "--workers", id="no worker at all"),
        pytest.param(["--lease-seconds", "10"], "a leader has to stop before", id="a lease as short as its deadline"),
        pytest.param(["--retry-seconds", "9"], "one lost renewal", id="a single try before the deadline"),
        pytest.param(["--log-format", "XML"], "'JSON' or 'Text'", id="an unknown choice"),
    ],
)
def test_a_mistake_ends_the_process_with_a_sentence(
    arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        read_settings(arguments)
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert says in said
    assert "Traceback" not in said


def test_help_names_every_flag(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        read_settings(["--help"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    assert "--lease-seconds" in said
    assert "{SelfSigned,CertManager}" in said


def test_no_two_processes_have_one_identity() -> None:
    assert unique_identity("pod-1") != unique_identity("pod-1")
    assert unique_identity("pod-1").startswith("pod-1_")
