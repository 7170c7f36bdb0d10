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
from moejob_api.job.evaluations import comparison_measure, needs_evaluation
from moejob_trainer.data.corpus import Corpus
from moejob_trainer.data.stream import BatchShare, BatchSize, evaluation_batches
from moejob_trainer.distributed.coordination import Coordinator, run_on_first_rank
from moejob_trainer.evaluation.answers import EvalPrompts
from moejob_trainer.evaluation.ranking import EvaluationRanking, EvaluationScore, RankingTerms, add_evaluation
from moejob_trainer.objectives import Objective, StoppedWaiting
from moejob_trainer.objectives.answering import NextTokenModel
from moejob_trainer.training import TrainingEngine

_RANKING = TypeAdapter(EvaluationRanking)


@dataclass(frozen=True, slots=True)
class _SetLoss:
    """The sum of a loss over tokens, and the weight of these tokens."""

    total: float
    weight: float

    def as_metrics(self, suffix: str = "") -> dict[str, float]:
        """Return loss and perplexity; the perplexity is infinite where a float cannot hold it."""
        loss = self.total / self.weight
        perplexity = math.exp(loss) if loss < math.log(1e300) else math.inf
        return {f"evalLoss{suffix}": loss, f"evalPerplexity{suffix}": perplexity}


class EvaluatedTrainingEngine(TrainingEngine, NextTokenModel, Protocol):
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

    def evaluate_sets(self, step: int) -> Mapping[str, float]:
        """Evaluate; return the metrics of all sets together, then of each set if there are several."""
        answer_metrics = self.prompts.evaluate_answers(step, self.engine, self.share, partial(self.beat, step))
        return {**self._loss_metrics(), **answer_metrics}

    def _loss_metrics(self) -> dict[str, float]:
        losses = [(name, self._corpus_loss(corpus)) for name, corpus in self.sets]
        if not losses:
            return {}
        total = sum(loss.total for _, loss in losses)
        metrics = _SetLoss(total, sum(loss.weight for _, loss in losses)).as_metrics()
        if len(losses) > 1:
            for name, loss in losses:
                metrics |= loss.as_metrics(f"/{name}")
        return metrics

    def _corpus_loss(self, corpus: Corpus) -> _SetLoss:
        # The mean over batches is weighted by the loss weight of each batch.
        total = weight = 0.0
        for batch in evaluation_batches([corpus], self.size, self.share):
            result = self.engine.evaluate(batch.micro_batches, self.objective.loss)
            total += result.loss * batch.loss_weight
            weight += batch.loss_weight
        return _SetLoss(total, weight)


class RankedEvaluations:
    """The evaluations of a run in their order, every training.evalEvery steps and after the last one.

    Rank 0 alone has all metrics of GRPO, so it ranks them and sends the ranking to all ranks.
    """

    def __init__(
        self, spec: Spec, total_steps: int, ranks: Coordinator, evaluate: Callable[[int], Mapping[str, float]]
    ) -> None:
        self._spec, self._total_steps, self._ranks, self._evaluate = spec, total_steps, ranks, evaluate
        self._ranking = EvaluationRanking(measure=comparison_measure(spec) or "")
        stop = spec.training.early_stop
        self._terms = RankingTerms(spec.checkpoint.keep_best or 1, 0.0 if stop is None else stop.minimum_improvement)

    def evaluate_if_due(self, step: int) -> Mapping[str, float]:
        """Evaluate if it is due; return the metrics to report."""
        if not needs_evaluation(self._spec, step, self._total_steps):
            return {}
        try:
            metrics = self._evaluate(step)
        except StoppedWaiting:
            # The step that was made is reported and saved without it.
            return {}
        self._ranking = run_on_first_rank(self._ranks, partial(self._rank_evaluation, step, metrics), _RANKING)
        if self._ranks.rank == 0 and self.is_stopped_early():
            sys.stdout.write(f"{self.stop_reason()}\n")
        return {**metrics, **self.as_fields()}

    def kept_score(self, step: int) -> EvaluationScore | None:
        """Return the score of the evaluation after a step if keepBest keeps its checkpoint, else None."""
        return None if self._spec.checkpoint.keep_best is None else self._ranking.kept_score(step)

    def is_among_best(self, step: int) -> bool:
        """Return whether the checkpoint of a step is one that keepBest keeps."""
        return self.kept_score(step) is not None

    @property
    def stopped_at(self) -> int | None:
        """The step after which the run stops early, because its evaluations no longer improve; None while they do."""
        stop, ranking = self._spec.training.early_stop, self._ranking
        is_over = stop is not None and ranking.without_improvement >= stop.patience
        return ranking.step if is_over and ranking.step < self._total_steps else None

    def is_stopped_early(self) -> bool:
        """Return whether the run stops early; every rank returns the same."""
        return self.stopped_at is not None

    def stop_reason(self) -> str:
        """Return the reason that the run stops early, in a sentence."""
        ranking = self._ranking
        margin_words = f" by {self._terms.least_improvement:g}" if self._terms.least_improvement else ""
        reference_words = "" if ranking.reference is None else f" than {ranking.reference:.6g}"
        return (
            f"stopped early at step {ranking.step} of {self._total_steps}: {ranking.without_improvement} evaluations "
            f"in a row without a better {ranking.measure}{reference_words}{margin_words}"
        )

    @property
    def measure(self) -> str:
        """The ranking's measure."""
        return self._ranking.measure

    def as_fields(self) -> dict[str, float]:
        """Return the reported fields of the evaluations so far."""
        fields = self._ranking.as_fields()
        if self._spec.training.early_stop is not None and self._ranking.step:
            fields["evaluationsWithoutImprovement"] = self._ranking.without_improvement
        return fields | ({StatusMeasure.STOPPED_EARLY.value: True} if self.is_stopped_early() else {})

    def state_dict(self) -> Mapping[str, Any]:
        """Return the ranking as plain JSON, its absent fields left out."""
        return self._ranking.model_dump(mode="json", by_alias=True, exclude_none=True)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from that state, unless it has scores by another measure, which cannot be compared with later ones."""
        ranking = EvaluationRanking.model_validate_json(json.dumps(state))
        if ranking.measure == self._ranking.measure:
            self._ranking = ranking

    def _rank_evaluation(self, step: int, metrics: Mapping[str, float]) -> EvaluationRanking:
        return add_evaluation(self._ranking, step, metrics.get(self._ranking.measure), self._terms)
