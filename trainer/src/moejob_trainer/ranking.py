"""The order of a run's evaluations: the best so far, whose checkpoints are kept. Pure.

What is decided here is a function of the scores alone and part of every checkpoint: a run that is killed and resumed
decides again as it did.
"""

from __future__ import annotations

import math
from typing import Annotated

from pydantic import Field

from moejob_api.evaluations import is_better
from moejob_api.job.base import ApiModel


class Score(ApiModel):
    """The score of the evaluation after a step."""

    step: Annotated[int, Field(ge=0)]
    value: float


class Ranking(ApiModel):
    """Evaluations by one measure, in as much as they count for what is decided next."""

    measure: str
    # The best first.
    best: tuple[Score, ...] = ()
    newest: Score | None = None

    def kept(self, step: int) -> Score | None:
        """Return the score of the evaluation after a step, should it be among the best."""
        return next((one for one in self.best if one.step == step), None)

    def as_fields(self) -> dict[str, float]:
        """Return what a line of the step log says of it."""
        newest = {} if self.newest is None else {"evalScore": self.newest.value}
        best = {"bestStep": self.best[0].step, "bestScore": self.best[0].value} if self.best else {}
        return {**newest, **best}


def ranked(before: Ranking, step: int, value: float | None, keep: int) -> Ranking:
    """Return the ranking with one evaluation more. One without a score, or with one that is not finite, is no best.

    Of two alike the earlier is the better: nothing has been gained since.
    """
    if value is None or not math.isfinite(value):
        return before.model_copy(update={"newest": None})
    score = Score(step=step, value=value)
    # A run that evaluates a step again, because it was resumed before it, has the step once.
    others = [one for one in before.best if one.step != step]
    place = sum(not is_better(before.measure, value, one.value) for one in others)
    best = (*others[:place], score, *others[place:])[:keep]
    return before.model_copy(update={"best": best, "newest": score})
