"""Beats from a rank to its launcher."""

from __future__ import annotations

from pathlib import Path

import pytest

from moejob_api.contract import PodProgress, RankBeat, RunProgress
from moejob_trainer.beats import BOARD, Beats, Board, NoLauncher, Pulse
from moejob_trainer.launcher.metrics import exposition


def test_a_board_shows_who_has_beaten_at_which_step(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", 3)
    Beats.for_rank({BOARD: str(board.folder), "LOCAL_RANK": "1"}).beat(42)
    rows = board.heard()
    assert [(row.has_beaten, row.step) for row in rows] == [(False, 0), (True, 42), (False, 0)]
    # The one that beat was heard of last; the others when they were started.
    assert 0 <= rows[1].age_seconds < rows[0].age_seconds


def test_what_rank_0_says_is_read_and_carried_to_the_next_board(tmp_path: Path) -> None:
    board = Board(tmp_path / "first", 1)
    assert board.run() is None
    said = RunProgress(step=3, loss=1.5)
    Beats.for_rank({BOARD: str(board.folder), "LOCAL_RANK": "0"}).say(said)
    assert board.run() == said
    assert Board(tmp_path / "second", 1, said).run() == said


def test_a_beat_into_an_older_board_is_not_seen(tmp_path: Path) -> None:
    old = Board(tmp_path / "old", 1)
    late = Beats.for_rank({BOARD: str(old.folder), "LOCAL_RANK": "0"})
    new = Board(tmp_path / "new", 1)
    late.beat(5)
    assert not new.heard()[0].has_beaten


def test_a_run_that_cannot_be_shown_goes_on(tmp_path: Path) -> None:
    board = Board(tmp_path / "board", 1)
    beats = Beats.for_rank({BOARD: str(board.folder), "LOCAL_RANK": "0"})
    (board.folder / "run.new").mkdir()
    beats.say(RunProgress(step=1))
    assert board.run() is None


def test_beats_without_a_launcher_are_an_error_unless_asked_for() -> None:
    with pytest.raises(NoLauncher, match=r"moejob_trainer\.launcher"):
        Beats.for_rank({})
    beats = Beats.unheard()
    beats.beat(1)
    beats.say(RunProgress(step=1))


def test_metrics_are_what_prometheus_reads() -> None:
    pod = PodProgress(
        attempt=1,
        index=0,
        restarts=2,
        ready=True,
        ranks=(RankBeat(rank=8, pid=7, step=3, age_seconds=0.25),),
        run=RunProgress(step=3, mfu=0.4),
    )
    assert exposition(pod).splitlines() == [
        "# HELP moejob_pod_ready Every rank of the pod has sent a heartbeat.",
        "# TYPE moejob_pod_ready gauge",
        "moejob_pod_ready 1",
        "# HELP moejob_rank_beat_age_seconds Seconds since the last sign of life.",
        "# TYPE moejob_rank_beat_age_seconds gauge",
        'moejob_rank_beat_age_seconds{rank="8"} 0.25',
        "# HELP moejob_rank_step Steps a rank has done.",
        "# TYPE moejob_rank_step gauge",
        'moejob_rank_step{rank="8"} 3',
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
    board = Board(tmp_path / "board", 1)
    beats = Beats.for_rank({BOARD: str(board.folder), "LOCAL_RANK": "0"})
    with Pulse(beats, step=7) as pulse:
        pulse.stop()
    (heard,) = board.heard()
    assert heard.has_beaten
    assert heard.step == 7
