"""Decisions that all ranks share."""

from __future__ import annotations

import pytest

from moejob_trainer.distributed.coordination import SingleRank, is_true_everywhere, run_on_all_ranks, run_on_first_rank
from moejob_trainer.distributed.encoding import INTEGER, NOTHING
from moejob_trainer.errors import BadConfiguration, BadData, Superseded, TransientFailure
from trainer.checkpoints.stand_ins import ThreadCoordinator, ThreadCoordinators


def describe_outcomes(outcomes: list[object]) -> list[tuple[type[object], str]]:
    return [(type(outcome), str(outcome)) for outcome in outcomes]


def test_rank_0_decides_and_everyone_hears_it() -> None:
    def act(rank: ThreadCoordinator) -> int:
        return run_on_first_rank(rank, lambda: 10 + rank.rank, INTEGER)

    assert ThreadCoordinators(3).run_on_ranks(act) == [10, 10, 10]


def test_a_failure_of_rank_0_is_raised_on_every_rank() -> None:
    def fail() -> None:
        raise BadConfiguration("the volume is read-only")

    outcomes = ThreadCoordinators(3).run_on_ranks(lambda rank: run_on_first_rank(rank, fail, NOTHING))
    assert describe_outcomes(list(outcomes)) == [(BadConfiguration, "the volume is read-only")] * 3


def test_results_of_everyone_are_gathered_at_rank_0() -> None:
    outcomes = ThreadCoordinators(3).run_on_ranks(lambda rank: run_on_all_ranks(rank, lambda: rank.rank, INTEGER))
    assert outcomes == [[0, 1, 2], [], []]


@pytest.mark.parametrize(
    ("failures", "kind", "message"),
    [
        pytest.param({2: TransientFailure("lost")}, TransientFailure, "rank 2: lost", id="one rank"),
        pytest.param(
            {1: TransientFailure("a"), 2: BadConfiguration("b")}, BadConfiguration, "rank 2: b", id="the worst"
        ),
        pytest.param(
            {1: BadConfiguration("a"), 2: Superseded("b")}, Superseded, "rank 2: b", id="superseded above all"
        ),
        pytest.param({1: BadData("a")}, BadConfiguration, "rank 1: a", id="a special case of a kind"),
        pytest.param(
            {2: TransientFailure("b"), 1: TransientFailure("a")},
            TransientFailure,
            "rank 1: a",
            id="the first of equals",
        ),
    ],
)
def test_a_failure_of_one_is_a_failure_of_all(
    failures: dict[int, Exception], kind: type[Exception], message: str
) -> None:
    def act(rank: ThreadCoordinator) -> list[int]:
        def one() -> int:
            if rank.rank in failures:
                raise failures[rank.rank]
            return 0

        return run_on_all_ranks(rank, one, INTEGER)

    assert describe_outcomes(list(ThreadCoordinators(3).run_on_ranks(act))) == [(kind, message)] * 3


@pytest.mark.parametrize(("claims", "together"), [([True] * 3, True), ([True, True, False], False)])
def test_all_agree_or_none(claims: list[bool], together: bool) -> None:
    assert (
        ThreadCoordinators(3).run_on_ranks(lambda rank: is_true_everywhere(rank, claims[rank.rank])) == [together] * 3
    )


def test_one_rank_alone_agrees_with_itself() -> None:
    assert run_on_all_ranks(SingleRank(), lambda: 5, INTEGER) == [5]
    assert run_on_first_rank(SingleRank(), lambda: 5, INTEGER) == 5
    assert not is_true_everywhere(SingleRank(), False)
