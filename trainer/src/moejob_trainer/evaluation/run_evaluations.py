"""Evaluations of a run at the steps that the job names: loss and perplexity of each set, answers, and their order."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from pydantic import TypeAdapter

from moejob_api.contract.pods import StatusMeasure
from moejob_api.job import Spec
from moejob_api.job.evaluations import evaluates, measure
from moejob_trainer.data.corpus import Corpus
from moejob_trainer.data.stream import BatchShare, BatchSize, evaluation
from moejob_trainer.distributed.coordination import Coordinator, on_first_rank
from moejob_trainer.evaluation.answers import EvalPrompts
from moejob_trainer.evaluation.ranking import EvaluationScore, Ranking, RankingTerms, ranked
from moejob_trainer.objectives import Objective
from moejob_trainer.objectives.answering import NextTokens
from moejob_trainer.training import TrainingEngine

_RANKING = TypeAdapter(Ranking)


@dataclass(frozen=True, slots=True)
class _Loss:
    """The sum of a loss over tokens, and the weight of these tokens."""

    total: float
    weight: float

    def metrics(self, suffix: str = "") -> dict[str, float]:
        """Return loss and perplexity; the perplexity is infinite where a float cannot hold it."""
        loss = self.total / self.weight
        perplexity = math.exp(loss) if loss < math.log(1e300) else math.inf
        return {f"evalLoss{suffix}": loss, f"evalPerplexity{suffix}": perplexity}


class EvaluatedTrainingEngine(TrainingEngine, NextTokens, Protocol):
    """An engine that can also answer."""


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates the weights of an engine."""

    engine: EvaluatedTrainingEngine
    objective: Objective
    # Held-out sets by their names, all of them together one loss.
    sets: Sequence[tuple[str, Corpus]]
    prompts: EvalPrompts
    size: BatchSize
    share: BatchShare
    # Called after each token of all answers, with the steps done: a heartbeat.
    beat: Callable[[int], object] = lambda _: None

    def metrics(self, step: int) -> Mapping[str, float]:
        """Evaluate; return the metrics of all sets together, then those of each set if there are several."""
        of_answers = self.prompts.metrics(step, self.engine, self.share, partial(self.beat, step))
        return {**self._losses(), **of_answers}

    def _losses(self) -> dict[str, float]:
        losses = [(name, self._loss(corpus)) for name, corpus in self.sets]
        if not losses:
            return {}
        total = sum(loss.total for _, loss in losses)
        metrics = _Loss(total, sum(loss.weight for _, loss in losses)).metrics()
        if len(losses) > 1:
            for name, loss in losses:
                metrics |= loss.metrics(f"/{name}")
        return metrics

    def _loss(self, corpus: Corpus) -> _Loss:
        # The mean over batches is weighted by the loss weight of each batch.
        total = weight = 0.0
        for batch in evaluation([corpus], self.size, self.share):
            result = self.engine.evaluate(batch.micro_batches, self.objective.loss)
            total += result.loss * batch.loss_weight
            weight += batch.loss_weight
        return _Loss(total, weight)


class RankedEvaluations:
    """The evaluations of a run in their order, every training.evalEvery steps and after the last one.

    Rank 0 alone has all metrics of GRPO, so it ranks them and sends the ranking to all ranks.
    """

    def __init__(
        self, spec: Spec, total_steps: int, ranks: Coordinator, evaluate: Callable[[int], Mapping[str, float]]
    ) -> None:
        self._spec, self._total_steps, self._ranks, self._evaluate = spec, total_steps, ranks, evaluate
        self._ranking = Ranking(measure=measure(spec) or "")
        stop = spec.training.early_stop
        self._terms = RankingTerms(spec.checkpoint.keep_best or 1, 0.0 if stop is None else stop.minimum_improvement)

    def metrics(self, step: int) -> Mapping[str, float]:
        """Evaluate if it is due; return the metrics to report."""
        if not evaluates(self._spec, step, self._total_steps):
            return {}
        found = self._evaluate(step)
        self._ranking = on_first_rank(self._ranks, partial(self._ranked, step, found), _RANKING)
        if self._ranks.rank == 0 and self.is_over():
            sys.stdout.write(f"{self.verdict()}\n")
        return {**found, **self.as_fields()}

    def kept(self, step: int) -> EvaluationScore | None:
        """Return the score of the evaluation after a step if keepBest keeps its checkpoint, else None."""
        return None if self._spec.checkpoint.keep_best is None else self._ranking.kept(step)

    def is_among_best(self, step: int) -> bool:
        """Return whether the checkpoint of a step is one that keepBest keeps."""
        return self.kept(step) is not None

    @property
    def stopped_at(self) -> int | None:
        """The step after which the run stops early, because its evaluations no longer improve; None while they do."""
        stop, ranking = self._spec.training.early_stop, self._ranking
        is_over = stop is not None and ranking.without_improvement >= stop.patience
        return ranking.step if is_over and ranking.step < self._total_steps else None

    def is_over(self) -> bool:
        """Return whether the run stops early; every rank returns the same."""
        return self.stopped_at is not None

    def verdict(self) -> str:
        """Return the reason that the run stops early, in a sentence."""
        ranking = self._ranking
        least = f" by {self._terms.least_improvement:g}" if self._terms.least_improvement else ""
        than = "" if ranking.reference is None else f" than {ranking.reference:.6g}"
        return (
            f"stopped early at step {ranking.step} of {self._total_steps}: {ranking.without_improvement} evaluations "
            f"in a row without a better {ranking.measure}{than}{least}"
        )

    @property
    def measure(self) -> str:
        """The number by which evaluations are compared."""
        return self._ranking.measure

    def as_fields(self) -> dict[str, float]:
        """Return the reported fields of the evaluations so far."""
        found = self._ranking.as_fields()
        if self._spec.training.early_stop is not None and self._ranking.step:
            found["evaluationsWithoutImprovement"] = self._ranking.without_improvement
        return found | ({StatusMeasure.STOPPED_EARLY.value: True} if self.is_over() else {})

    def state_dict(self) -> Mapping[str, Any]:
        """Return the state to resume from: plain JSON."""
        return self._ranking.model_dump(mode="json", by_alias=True, exclude_none=True)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from that state, unless it has scores by another measure, which cannot be compared with later ones."""
        ranking = Ranking.model_validate_json(json.dumps(state))
        if ranking.measure == self._ranking.measure:
            self._ranking = ranking

    def _ranked(self, step: int, found: Mapping[str, float]) -> Ranking:
        return ranked(self._ranking, step, found.get(self._ranking.measure), self._terms)
