"""Claims on a run folder, by processes that race for it."""

from __future__ import annotations

import multiprocessing
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import pytest

from moejob_trainer.errors import Superseded
from moejob_trainer.runtime.fencing import FenceToken, acquire_token, is_ours, newest_token


def test_the_newest_claim_holds_the_folder(tmp_path: Path) -> None:
    assert newest_token(tmp_path) is None
    first = acquire_token(tmp_path, 1, 0)
    assert is_ours(tmp_path, first)
    second = acquire_token(tmp_path, 1, 1)
    third = acquire_token(tmp_path, 2, 0)
    assert [is_ours(tmp_path, held) for held in (first, second, third)] == [False, False, True]
    assert newest_token(tmp_path) == third


@pytest.mark.parametrize(
    ("attempt", "restart", "said"),
    [
        pytest.param(1, 9, "belongs to attempt 2, restart 3 now", id="older attempt"),
        pytest.param(2, 2, "belongs to attempt 2, restart 3 now", id="older restart"),
        pytest.param(2, 3, "already used by attempt 2, restart 3", id="the same one again"),
    ],
)
def test_who_is_not_newer_is_refused_and_changes_nothing(tmp_path: Path, attempt: int, restart: int, said: str) -> None:
    held = acquire_token(tmp_path, 2, 3)
    with pytest.raises(Superseded, match=said):
        acquire_token(tmp_path, attempt, restart)
    assert is_ours(tmp_path, held)
    assert sorted(path.name for path in (tmp_path / "claims").iterdir()) == ["0000000002.0000000003"]


def test_numbers_are_compared_as_numbers(tmp_path: Path) -> None:
    acquire_token(tmp_path, 9, 0)
    tenth = acquire_token(tmp_path, 10, 0)
    assert newest_token(tmp_path) == tenth


def test_a_rank_knows_its_claim() -> None:
    assert FenceToken.of_rank({"MOEJOB_ATTEMPT": "3", "TORCHELASTIC_RESTART_COUNT": "2"}) == FenceToken(3, 2)


def test_of_processes_that_race_only_the_newest_holds_the_folder_in_the_end(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    rounds, racers = 200, 3
    start, end = context.Barrier(racers), context.Barrier(racers)
    pipes = [context.Pipe(duplex=False) for _ in range(racers)]
    processes = [
        context.Process(target=_race, args=(tmp_path, attempt, rounds, (start, end), pipes[attempt][1]))
        for attempt in range(racers)
    ]
    for process in processes:
        process.start()
    outcomes = [pipe.recv() for pipe, _ in pipes]
    for process in processes:
        process.join()
    # However they interleave, the newest attempt got its claim and no other holds the folder afterwards.
    assert outcomes == [[False] * rounds, [False] * rounds, [True] * rounds]


def _race(
    folder: Path, attempt: int, rounds: int, barriers: tuple[Barrier, Barrier], answers: Connection[list[bool], None]
) -> None:
    held = []
    for number in range(rounds):
        barriers[0].wait()
        mine = None
        with suppress(Superseded):
            mine = acquire_token(folder / str(number), attempt, 0)
        barriers[1].wait()
        held.append(mine is not None and is_ours(folder / str(number), mine))
    answers.send(held)
