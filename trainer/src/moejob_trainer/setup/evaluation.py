"""Loss and perplexity of the evaluation data, each set by itself, at the steps that the job names."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from moejob_api.job import Spec
from moejob_api.job.model import Dataset
from moejob_trainer.data.corpus import Corpus
from moejob_trainer.data.stream import batch_size, evaluation
from moejob_trainer.engine import Engine
from moejob_trainer.objectives import Objective
from moejob_trainer.setup.data import RunData


def is_due(spec: Spec, step: int, total_steps: int) -> bool:
    """Return whether to evaluate after a step."""
    every = spec.training.eval_every
    return step == total_steps or (every is not None and step % every == 0)


def set_names(datasets: Sequence[Dataset]) -> tuple[str, ...]:
    """Name data sets by their files or repositories, with the split where it is not train, numbered where they repeat.

    /data/held-out.jsonl and org/chats[test] are held-out and chats-test.
    """
    plain = [_plain_name(dataset) for dataset in datasets]
    seen = Counter[str]()
    names = []
    for name in plain:
        seen[name] += 1
        names.append(f"{name}-{seen[name]}" if plain.count(name) > 1 else name)
    return tuple(names)


def _plain_name(dataset: Dataset) -> str:
    stem = PurePosixPath(dataset.source).name.partition(".")[0] or "data"
    return stem if dataset.split == "train" else f"{stem}-{dataset.split}"


@dataclass(frozen=True, slots=True)
class _Loss:
    """The sum of a loss over tokens, and their weight."""

    total: float
    weight: float

    def metrics(self, suffix: str = "") -> dict[str, float]:
        """Return loss and perplexity; a loss beyond what a float holds has a perplexity of infinity."""
        loss = self.total / self.weight
        perplexity = math.exp(loss) if loss < math.log(1e300) else math.inf
        return {f"evalLoss{suffix}": loss, f"evalPerplexity{suffix}": perplexity}


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Evaluates every training.evalEvery steps and after the last one."""

    engine: Engine
    objective: Objective
    data: RunData
    spec: Spec
    total_steps: int

    def metrics(self, step: int) -> Mapping[str, float]:
        """Evaluate if it is due; return what there is to report: of all sets together, then of each of several."""
        if not self.data.evaluation or not is_due(self.spec, step, self.total_steps):
            return {}
        losses = [self._loss(corpus) for corpus in self.data.evaluation]
        found = _Loss(sum(loss.total for loss in losses), sum(loss.weight for loss in losses)).metrics()
        if len(losses) > 1:
            for name, loss in zip(set_names(self.spec.data.eval), losses, strict=True):
                found |= loss.metrics(f"/{name}")
        return found

    def _loss(self, corpus: Corpus) -> _Loss:
        # Each batch counts as much as the weight it carries.
        total = weight = 0.0
        for batch in evaluation([corpus], batch_size(self.spec), self.data.share):
            result = self.engine.evaluate(batch.micro_batches, self.objective.loss)
            total += result.loss * batch.loss_weight
            weight += batch.loss_weight
        return _Loss(total, weight)
