"""Each second of a run has one kind, and a failure has its cost."""

from __future__ import annotations

import pytest

from moejob_api.contract.record import RecordEvent, RunEventKind
from moejob_cli.board.ledger import RankStart, StepRow, TimeKind, build_ledger


def row(step: int, time: float, **more: float) -> StepRow:
    return StepRow(step, time, seconds=2.0, **more)


def event(time: float, kind: RunEventKind, state: str = "") -> RecordEvent:
    return RecordEvent(time=time, kind=kind, state=state, message="rank 1 failed")


def test_a_failure_costs_the_time_to_the_next_step_and_the_steps_done_again() -> None:
    first = RankStart(
        1,
        0,
        [row(1, 12), row(2, 14, wait_seconds=0.5), row(3, 17, evaluate_seconds=1.0)],
        [event(0, RunEventKind.LAUNCHER_STARTED), event(18, RunEventKind.RANKS_FAILED)],
    )
    second = RankStart(
        1,
        1,
        [row(3, 30), row(4, 32, stall_seconds=0.25), row(5, 34, stall_seconds=0.25)],
        [event(22, RunEventKind.RANKS_STARTED), event(40, RunEventKind.LAUNCHER_ENDED, "Completed")],
    )
    ledger = build_ledger([first, second])
    assert ledger.totals() == pytest.approx(
        {
            "starting": 10.0,
            "training": 12.0 - 0.5 - 0.25,
            "waiting": 0.5,
            # A line repeats the stall of the last save. Behind the steps each start saved or ended: 1 s and 6 s.
            "saving": 0.25 + 1.0 + 6.0,
            "evaluating": 1.0,
            "recovering": 10.0,
            "stopped": 0.0,
        }
    )
    assert sum(ledger.totals().values()) == pytest.approx(40.0)
    (failure,) = ledger.failures
    assert (failure.step, failure.repeated_steps, failure.repeated_seconds) == (3, 1, 2.0)
    assert (failure.recovery_seconds, failure.message) == (10.0, "rank 1 failed")


def test_time_between_a_requested_stop_and_the_next_start_is_no_failure() -> None:
    first = RankStart(1, 0, [row(1, 12)], [event(13, RunEventKind.LAUNCHER_ENDED, "Preempted")])
    second = RankStart(2, 0, [row(2, 120)], [event(100, RunEventKind.LAUNCHER_STARTED)])
    ledger = build_ledger([first, second])
    assert not ledger.failures
    assert (ledger.totals()["stopped"], ledger.totals()["starting"]) == (87.0, 18.0)


def test_a_kill_from_outside_is_told_by_the_start_that_follows() -> None:
    ledger = build_ledger([RankStart(1, 0, [row(1, 12)]), RankStart(2, 0, [row(1, 30)])])
    assert "killed from outside" in ledger.failures[0].message
    assert ledger.totals()["recovering"] == 16.0


def test_many_steps_become_few_pieces_with_the_same_seconds() -> None:
    rows = [row(step, 2.0 * step, wait_seconds=0.5) for step in range(1, 10_001)]
    ledger = build_ledger([RankStart(1, 0, rows)])
    assert len(ledger.pieces) <= 241
    assert sum(ledger.totals().values()) == pytest.approx(20_000.0)
    assert ledger.totals()[TimeKind.WAITING] == pytest.approx(5_000.0)


def test_a_run_without_any_start_has_no_time() -> None:
    assert build_ledger([]).pieces == []
