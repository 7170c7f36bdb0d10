"""How ranks agree."""

from __future__ import annotations

import pytest

from moejob_trainer.checkpoints.ranks import Alone, agreed, decided, everyone
from moejob_trainer.errors import BadConfiguration, Retryable, Superseded
from trainer.checkpoints.worlds import RankOfThreads, RanksOfThreads


def said(outcomes: list[object]) -> list[tuple[type[object], str]]:
    return [(type(outcome), str(outcome)) for outcome in outcomes]


def test_rank_0_decides_and_everyone_hears_it() -> None:
    def act(rank: RankOfThreads) -> int:
        return decided(rank, lambda: 10 + rank.rank)

    assert RanksOfThreads(3).together(act) == [10, 10, 10]


def test_a_failure_of_rank_0_is_raised_on_every_rank() -> None:
    def fail() -> int:
        raise BadConfiguration("the volume is read-only")

    outcomes = RanksOfThreads(3).together(lambda rank: decided(rank, fail))
    assert said(list(outcomes)) == [(BadConfiguration, "the volume is read-only")] * 3


def test_results_of_everyone_are_gathered_at_rank_0() -> None:
    outcomes = RanksOfThreads(3).together(lambda rank: everyone(rank, lambda: rank.rank))
    assert outcomes == [[0, 1, 2], [], []]


@pytest.mark.parametrize(
    ("failures", "kind", "message"),
    [
        pytest.param({2: Retryable("lost")}, Retryable, "rank 2: lost", id="one rank"),
        pytest.param({1: Retryable("a"), 2: BadConfiguration("b")}, BadConfiguration, "rank 2: b", id="the worst"),
        pytest.param(
            {1: BadConfiguration("a"), 2: Superseded("b")}, Superseded, "rank 2: b", id="superseded above all"
        ),
        pytest.param({2: Retryable("b"), 1: Retryable("a")}, Retryable, "rank 1: a", id="the first of equals"),
    ],
)
def test_a_failure_of_one_is_a_failure_of_all(
    failures: dict[int, Exception], kind: type[Exception], message: str
) -> None:
    def act(rank: RankOfThreads) -> list[int]:
        def one() -> int:
            if rank.rank in failures:
                raise failures[rank.rank]
            return 0

        return everyone(rank, one)

    assert said(list(RanksOfThreads(3).together(act))) == [(kind, message)] * 3


@pytest.mark.parametrize(("claims", "together"), [([True] * 3, True), ([True, True, False], False)])
def test_all_agree_or_none(claims: list[bool], together: bool) -> None:
    assert RanksOfThreads(3).together(lambda rank: agreed(rank, claims[rank.rank])) == [together] * 3


def test_one_rank_alone_agrees_with_itself() -> None:
    assert everyone(Alone(), lambda: 5) == [5]
    assert decided(Alone(), lambda: 5) == 5
    assert not agreed(Alone(), False)
