"""The order of a run's evaluations: the best so far, whose checkpoints are kept, and how long none was better. Pure.

The ranking depends on scores alone and is part of every checkpoint, so a run that is killed and resumed makes the same
decisions again.

With patience 2 and a loss to lower, evaluations 3.0, 2.0, 2.5, 2.1 rank 2.0 first, and the fourth is the second in a
row without an improvement: the run stops early.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from moejob_api.contract.pods import StatusMeasure
from moejob_api.job.base import ApiModel
from moejob_api.job.evaluations import is_better


class EvaluationScore(ApiModel):
    """The score of the evaluation after a step."""

    step: Annotated[int, Field(ge=0)]
    value: float


class EvaluationRanking(ApiModel):
    """The evaluations by one measure that later decisions need."""

    measure: str
    # The best first.
    best: tuple[EvaluationScore, ...] = ()
    newest: EvaluationScore | None = None
    # The step of the newest evaluation, with or without a score.
    step: Annotated[int, Field(ge=0)] = 0
    # The score that the next improvement has to beat, and the number of evaluations since.
    reference: float | None = None
    without_improvement: Annotated[int, Field(ge=0)] = 0

    def kept_score(self, step: int) -> EvaluationScore | None:
        """Return the score of the evaluation after a step if it is among the best, else None."""
        return next((score for score in self.best if score.step == step), None)

    def as_fields(self) -> dict[str, float]:
        """Return the fields of a line of the step log."""
        fields: dict[str, float] = {} if self.newest is None else {StatusMeasure.EVAL_SCORE.value: self.newest.value}
        if self.best:
            fields |= {
                StatusMeasure.BEST_STEP.value: self.best[0].step,
                StatusMeasure.BEST_SCORE.value: self.best[0].value,
            }
        return fields


@dataclass(frozen=True, slots=True)
class RankingTerms:
    """The number of best checkpoints to keep, and the least change that counts as an improvement."""

    keep: int = 1
    least_improvement: float = 0.0


def add_evaluation(
    ranking: EvaluationRanking, step: int, value: float | None, terms: RankingTerms
) -> EvaluationRanking:
    """Return the ranking with one evaluation more.

    An evaluation without a score, because no answer could be scored, changes no rank. A score that is not finite is
    never among the best and no improvement. Of two equal scores the earlier ranks first: nothing was gained since.
    """
    if value is None:
        return ranking.model_copy(update={"newest": None, "step": step})
    if not math.isfinite(value):
        return ranking.model_copy(
            update={"newest": None, "step": step, "without_improvement": ranking.without_improvement + 1}
        )
    score = EvaluationScore(step=step, value=value)
    # A run that was resumed before this step evaluates it again; the ranking has each step once.
    earlier_scores = [earlier_score for earlier_score in ranking.best if earlier_score.step != step]
    rank = sum(not is_better(ranking.measure, value, score.value) for score in earlier_scores)
    best = (*earlier_scores[:rank], score, *earlier_scores[rank:])[: terms.keep]
    is_improvement = ranking.reference is None or is_better(
        ranking.measure, value, ranking.reference, terms.least_improvement
    )
    return ranking.model_copy(
        update={
            "best": best,
            "newest": score,
            "step": step,
            "reference": value if is_improvement else ranking.reference,
            "without_improvement": 0 if is_improvement else ranking.without_improvement + 1,
        }
    )
