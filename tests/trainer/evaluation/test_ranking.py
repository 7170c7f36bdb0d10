"""Evaluations are put in order: by their measure, of two alike the earlier first, and no more than are kept."""

from __future__ import annotations

import math

import pytest
from pydantic import TypeAdapter

from moejob_trainer.evaluation.ranking import EvaluationRanking, RankingTerms, add_evaluation


def after(
    scores: list[float | None], keep: int = 1, measure: str = "evalLoss", least: float = 0.0
) -> EvaluationRanking:
    """The ranking after evaluations at steps 10, 20, 30 and so on."""
    ranking = EvaluationRanking(measure=measure)
    for number, score in enumerate(scores, 1):
        ranking = add_evaluation(ranking, 10 * number, score, RankingTerms(keep, least))
    return ranking


@pytest.mark.parametrize(
    ("scores", "keep", "measure", "best"),
    [
        pytest.param([], 1, "evalLoss", [], id="none yet"),
        pytest.param([3.0, 1.0, 2.0], 1, "evalLoss", [20], id="the lowest loss"),
        pytest.param([3.0, 1.0, 2.0], 1, "evalLoss/held-out", [20], id="of one set too"),
        pytest.param([0.1, 0.5, 0.2], 1, "evalMean@4", [20], id="the highest reward"),
        pytest.param([3.0, 1.0, 2.0, 1.5], 2, "evalLoss", [20, 40], id="the two lowest"),
        pytest.param([3.0, 1.0], 5, "evalLoss", [20, 10], id="as many as there are"),
        pytest.param([2.0, 1.0, 1.0], 1, "evalLoss", [20], id="of two alike the earlier"),
        pytest.param([2.0, 1.0, 1.0], 2, "evalLoss", [20, 30], id="of two alike the earlier first"),
        pytest.param([2.0, math.nan, math.inf], 3, "evalLoss", [10], id="none that is not finite"),
        pytest.param([None, 2.0, None], 3, "evalLoss", [20], id="none without a score"),
    ],
)
def test_the_best_are(scores: list[float | None], keep: int, measure: str, best: list[int]) -> None:
    assert [one.step for one in after(scores, keep, measure).best] == best


@pytest.mark.parametrize(
    ("scores", "measure", "least", "without"),
    [
        pytest.param([], "evalLoss", 0.0, 0, id="none yet"),
        pytest.param([3.0], "evalLoss", 9.0, 0, id="the first improves on nothing"),
        pytest.param([3.0, 2.0, 1.0], "evalLoss", 0.0, 0, id="every one improves"),
        pytest.param([1.0, 2.0, 3.0], "evalLoss", 0.0, 2, id="none improves"),
        pytest.param([1.0, 1.0], "evalLoss", 0.0, 1, id="the same is no improvement"),
        pytest.param([0.5, 0.25, 0.75], "evalMean@4", 0.0, 0, id="a higher reward is one"),
        pytest.param([3.0, 2.75, 2.5, 2.25], "evalLoss", 0.5, 1, id="small steps add up"),
        pytest.param([3.0, 2.5], "evalLoss", 0.5, 0, id="exactly the least"),
        pytest.param([3.0, 2.75, 2.75], "evalLoss", 0.5, 2, id="less than the least"),
        pytest.param([3.0, math.nan, math.inf], "evalLoss", 0.0, 2, id="what is not finite is none"),
        pytest.param([3.0, 4.0, None, None], "evalLoss", 0.0, 1, id="one without a score says nothing"),
    ],
)
def test_evaluations_without_an_improvement_are_counted(
    scores: list[float | None], measure: str, least: float, without: int
) -> None:
    assert after(scores, measure=measure, least=least).without_improvement == without


def test_a_step_that_is_evaluated_again_counts_once() -> None:
    again = add_evaluation(after([3.0, 1.0], keep=2), 20, 4.0, RankingTerms(2))
    assert [(one.step, one.value) for one in again.best] == [(10, 3.0), (20, 4.0)]


@pytest.mark.parametrize(
    ("scores", "told"),
    [
        ([], {}),
        ([3.0, 1.0, 2.0], {"evalScore": 2.0, "bestStep": 20, "bestScore": 1.0}),
        ([3.0, math.nan], {"bestStep": 10, "bestScore": 3.0}),
    ],
)
def test_a_line_names_the_newest_score_and_the_best(scores: list[float | None], told: dict[str, float]) -> None:
    assert after(scores).as_fields() == told


def test_a_ranking_survives_the_checkpoint_that_it_is_in() -> None:
    ranking, kind = after([3.0, math.nan], keep=2), TypeAdapter(EvaluationRanking)
    assert kind.validate_json(kind.dump_json(ranking, by_alias=True, exclude_none=True)) == ranking
