"""Beats from a rank to its launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from moejob_api.contract.pods import PodProgress, ReportedHeartbeat, RunPhase, RunProgress
from moejob_trainer.launcher.metrics import format_metrics
from moejob_trainer.runtime.heartbeats import (
    BOARD,
    BackgroundHeartbeat,
    Heartbeat,
    HeartbeatBoard,
    NoLauncher,
    ShareCounter,
)


def test_a_board_shows_who_has_beaten_at_which_step(tmp_path: Path) -> None:
    board = HeartbeatBoard(tmp_path / "board", 3)
    Heartbeat.for_rank({BOARD: str(board.folder), "LOCAL_RANK": "1"}).beat(42)
    rows = board.read()
    assert [(row.has_beaten, row.step) for row in rows] == [(False, 0), (True, 42), (False, 0)]
    # The one that beat was heard of last; the others when they were started.
    assert 0 <= rows[1].age_seconds < rows[0].age_seconds


def test_a_board_shows_the_phase_of_each_rank_and_since_when(tmp_path: Path) -> None:
    board = HeartbeatBoard(tmp_path / "board", 2)
    heartbeat = Heartbeat.for_rank({BOARD: str(board.folder), "LOCAL_RANK": "1"})
    heartbeat.enter_phase(RunPhase.READING_MODEL)
    heartbeat.enter_phase(RunPhase.PREPARING_DATA)
    first = board.read()[1]
    heartbeat.enter_phase(RunPhase.PREPARING_DATA)
    rows = board.read()
    assert [row.phase for row in rows] == [None, RunPhase.PREPARING_DATA]
    assert rows[1].phase_seconds >= first.phase_seconds


def test_a_board_shows_the_share_of_a_phase_until_the_next_one(tmp_path: Path) -> None:
    board = HeartbeatBoard(tmp_path / "board", 1)
    heartbeat = Heartbeat.for_rank({BOARD: str(board.folder), "LOCAL_RANK": "0"})
    heartbeat.enter_phase(RunPhase.RESTORING)
    assert board.read()[0].phase_share is None
    counter = ShareCounter(8, heartbeat.report_share)
    shares = []
    for amount in (2, 1, 5, 3):
        counter.add(amount)
        shares.append(board.read()[0].phase_share)
    assert shares == [0.25, 0.375, 1.0, 1.0]
    heartbeat.enter_phase(RunPhase.CHECKING)
    assert board.read()[0].phase_share is None


def test_a_share_is_no_sign_of_life(tmp_path: Path) -> None:
    """A thread that reports it may run while the rank hangs: silence is found by heartbeats alone."""
    board = HeartbeatBoard(tmp_path / "board", 1)
    heartbeat = Heartbeat.for_rank({BOARD: str(board.folder), "LOCAL_RANK": "0"})
    heartbeat.enter_phase(RunPhase.RESTORING)
    before = board.read()[0]
    heartbeat.report_share(1, 2)
    after = board.read()[0]
    assert not after.has_beaten
    assert after.age_seconds >= before.age_seconds


def test_what_rank_0_says_is_read_and_carried_to_the_next_board(tmp_path: Path) -> None:
    board = HeartbeatBoard(tmp_path / "first", 1)
    assert board.read_run() is None
    said = RunProgress(step=3, loss=1.5)
    Heartbeat.for_rank({BOARD: str(board.folder), "LOCAL_RANK": "0"}).report_run(said)
    assert board.read_run() == said
    assert HeartbeatBoard(tmp_path / "second", 1, said).read_run() == said


def test_a_beat_into_an_older_board_is_not_seen(tmp_path: Path) -> None:
    old = HeartbeatBoard(tmp_path / "old", 1)
    late = Heartbeat.for_rank({BOARD: str(old.folder), "LOCAL_RANK": "0"})
    new = HeartbeatBoard(tmp_path / "new", 1)
    late.beat(5)
    assert not new.read()[0].has_beaten


def test_a_run_that_cannot_be_shown_goes_on(tmp_path: Path) -> None:
    board = HeartbeatBoard(tmp_path / "board", 1)
    heartbeat = Heartbeat.for_rank({BOARD: str(board.folder), "LOCAL_RANK": "0"})
    (board.folder / "run.new").mkdir()
    heartbeat.report_run(RunProgress(step=1))
    assert board.read_run() is None


def test_beats_without_a_launcher_are_an_error() -> None:
    with pytest.raises(NoLauncher, match=r"moejob_trainer\.launcher"):
        Heartbeat.for_rank({})


def test_metrics_are_what_prometheus_reads() -> None:
    pod = PodProgress(
        attempt=1,
        index=0,
        restarts=2,
        ready=True,
        ranks=(ReportedHeartbeat(rank=8, pid=7, step=3, age_seconds=0.25),),
        run=RunProgress(step=3, mfu=0.4),
        phase=RunPhase.STEPPING,
        phase_seconds=7.5,
    )
    assert format_metrics(pod).splitlines() == [
        "# HELP moejob_pod_ready Every rank of the pod has sent a heartbeat.",
        "# TYPE moejob_pod_ready gauge",
        "moejob_pod_ready 1",
        "# HELP moejob_rank_beat_age_seconds Seconds since the last sign of life.",
        "# TYPE moejob_rank_beat_age_seconds gauge",
        'moejob_rank_beat_age_seconds{rank="8"} 0.25',
        "# HELP moejob_rank_step Steps a rank has done.",
        "# TYPE moejob_rank_step gauge",
        'moejob_rank_step{rank="8"} 3',
        "# HELP moejob_phase_seconds How long the rank that is furthest behind has been in its phase.",
        "# TYPE moejob_phase_seconds gauge",
        'moejob_phase_seconds{phase="stepping"} 7.5',
        "# HELP moejob_rank_restarts_total Restarts of ranks in place that this pod was the reason for.",
        "# TYPE moejob_rank_restarts_total counter",
        "moejob_rank_restarts_total 2",
        "# HELP moejob_step Steps done.",
        "# TYPE moejob_step gauge",
        "moejob_step 3",
        "# HELP moejob_mfu_ratio Share of peak.",
        "# TYPE moejob_mfu_ratio gauge",
        "moejob_mfu_ratio 0.4",
    ]


def test_a_pulse_beats_until_it_is_stopped(tmp_path: Path) -> None:
    board = HeartbeatBoard(tmp_path / "board", 1)
    heartbeat = Heartbeat.for_rank({BOARD: str(board.folder), "LOCAL_RANK": "0"})
    with BackgroundHeartbeat(heartbeat, step=7) as background:
        background.stop()
    (heard,) = board.read()
    assert heard.has_beaten
    assert heard.step == 7
