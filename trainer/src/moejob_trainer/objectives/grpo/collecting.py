"""Rank 0's part of a step: prompts in, rewarded rollouts out, and their metrics and samples."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from moejob_api.job.grpo import Grpo
from moejob_trainer.data.prompt_loader import NumberedPrompt, PromptLoader
from moejob_trainer.data.prompts import Prompt
from moejob_trainer.objectives.grpo.rollout import rollout
from moejob_trainer.objectives.grpo.rollout_batch import Experience, experience
from moejob_trainer.objectives.grpo.sampling import Asker, Sampled, sample
from moejob_trainer.objectives.grpo.step_metrics import of_evaluation, of_rewards, of_versions, sample_lines
from moejob_trainer.rollouts.interface import Sampling
from moejob_trainer.runtime.disk import Disk, write_lines

T = TypeVar("T")
# Answers of each step that the log shows.
_SHOWN = 2
_SAMPLES = "samples"
# Numbers of evaluation prompts are below every training prompt's: their seeds are never the same.
_EVALUATION = -(2**31)


@dataclass(frozen=True, slots=True)
class PromptSets:
    """The prompts of training, which are drawn in turn, and those of an evaluation, which engines get all at once."""

    training: PromptLoader
    evaluation: Sequence[Prompt] = ()


class Collector:
    """Rank 0's source of rollouts. One event loop lasts the whole run: engines and rewards keep their connections."""

    def __init__(self, grpo: Grpo, asker: Asker, prompts: PromptSets, sampling: Sampling, folder: Path) -> None:
        self._grpo, self._asker, self._prompts, self._folder = grpo, asker, prompts, folder
        self._sampling = sampling
        self._runner = asker.runner or asyncio.Runner()
        # The request that was under way when engines lost the weights.
        self._unfinished: asyncio.Task[Any] | None = None
        self._sampled = Sampled(())
        self._metrics: dict[str, float] = {}

    def __enter__(self) -> Self:
        self._runner.__enter__()
        self._runner.run(self._asker.scorer.__aenter__())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._runner.run(self._asker.scorer.__aexit__(kind, error, trace))
        self._runner.__exit__(kind, error, trace)

    @property
    def sampled(self) -> Sampled:
        """Return the groups of the last step, with the groups that it leaves out."""
        return self._sampled

    @property
    def epoch(self) -> float:
        """Return the passes over the prompts so far."""
        return self._prompts.training.epoch

    def collect(self, step: int) -> Experience | None:
        """Return the rollouts of a step, without groups of failed rewards; None when engines lost the weights."""
        scorer = self._asker.scorer
        if self._unfinished is None:
            scorer.forget_failures()
        sampled = self._asked(lambda: sample(self._asker, self._prompts.training, self._grpo, self._sampling))
        if sampled is None:
            return None
        if not sampled.groups:
            raise scorer.nothing_left(f"every group of step {step + 1}")
        # The batch has the experts of all tokens; a second copy in these groups would double their memory.
        self._sampled = sampled.without_routing()
        self._metrics = of_rewards(sampled, scorer.names) | of_versions(sampled.groups, step)
        self._metrics |= {f"rewardFailures/{name}": float(count) for name, count in scorer.failures.items()}
        self._tell_failures()
        flat = [answer for group in sampled.groups for answer in group.answers]
        return experience([rollout(each.answer) for each in flat], [each.reward for each in flat])

    def evaluate(self) -> Mapping[str, float] | None:
        """Return mean@k and pass@k over all evaluation prompts."""
        settings = self._grpo.evaluation
        sampling = replace(
            self._sampling,
            temperature=settings.temperature or self._grpo.temperature,
            top_p=settings.top_p,
            # Nothing is learned from these answers.
            routing=None,
        )
        numbered = [NumberedPrompt(_EVALUATION + n, prompt) for n, prompt in enumerate(self._prompts.evaluation)]

        async def asked() -> Any:
            return await asyncio.gather(
                *(self._asker.group(each, settings.samples, sampling, self._grpo) for each in numbered)
            )

        weights = [reward.weight for reward in self._grpo.rewards]
        groups = self._asked(asked)
        if groups is None:
            return None
        return of_evaluation(groups, dict(zip(self._asker.scorer.names, weights, strict=True)))

    def learned(self, step: int, advantages: Sequence[float]) -> None:
        """Write the answers of a step to samples/step-N.jsonl, and a few to the log."""
        # The step log numbers a step by the steps that are done at its end.
        number = step + 1
        lines = list(sample_lines(self._sampled, advantages, number, max(self._grpo.logged_answers, _SHOWN)))
        for line in lines[:_SHOWN]:
            sys.stdout.write(f"{line}\n")
        if self._grpo.logged_answers:
            path = self._folder / _SAMPLES / f"step-{number}.jsonl"
            write_lines(Disk(), path, lines[: self._grpo.logged_answers])

    def metrics(self) -> Mapping[str, float]:
        """Return the numbers of the last step."""
        return self._metrics

    def state_dict(self) -> Mapping[str, Any]:
        """Return the place in the prompts: the run has trained on all before it, and drawn none behind it."""
        return self._prompts.training.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue behind the last prompt that was drawn."""
        self._prompts.training.load_state_dict(state)

    def _asked(self, asking: Callable[[], Coroutine[Any, Any, T]]) -> T | None:
        """Return the reply of engines; None when they lost the weights: the next call waits for the same request."""
        if self._unfinished is None:
            self._unfinished = self._runner.get_loop().create_task(asking())
        if not self._runner.run(self._is_finished(self._unfinished)):
            return None
        finished, self._unfinished = self._unfinished, None
        found: T = finished.result()
        return found

    async def _is_finished(self, asked: asyncio.Task[Any]) -> bool:
        outdated = asyncio.ensure_future(self._asker.generator.until_outdated())
        try:
            await asyncio.wait({asked, outdated}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            outdated.cancel()
        return asked.done()

    def _tell_failures(self) -> None:
        for name, count in self._asker.scorer.failures.items():
            kinds = ", ".join(f"{kind} {times}" for kind, times in self._asker.scorer.kinds[name].most_common())
            reason = self._asker.scorer.last_failure[name]
            sys.stderr.write(
                f"reward {name} failed for {count} answers ({kinds}), their groups are left out: {reason}\n"
            )
