"""Answers of an SFT run's model to its evaluation prompts: read, generated, scored, shown and written.

Every rank generates; rank 0 alone knows the records, scores and writes.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from moejob_api.job import Spec
from moejob_api.job.evaluations import MEAN, prompt_sets
from moejob_api.job.grpo import Reward
from moejob_api.job.model import Dataset
from moejob_api.job.training import EvalAnswers
from moejob_trainer.data.preparation import EncodingRecipe
from moejob_trainer.data.prompts import Prompt, read_prompts
from moejob_trainer.data.stream import BatchShare
from moejob_trainer.errors import BadData
from moejob_trainer.objectives.answering import AnswerBounds, NextTokenModel, generate_answers
from moejob_trainer.rewards.built_in import ScoreFunction, built_in_score
from moejob_trainer.rewards.completion import Completion, RewardFailed
from moejob_trainer.runtime.disk import Disk, write_lines

# Answers of each evaluation that the log shows.
_SHOWN = 2
_SAMPLES = "samples"


@dataclass(frozen=True, slots=True)
class AnsweredPrompt:
    """A prompt with its answer and its reward, which rank 0 alone has."""

    prompt: Prompt
    text: str
    tokens: int
    is_ended: bool
    reward: float

    def sample_line(self, step: int) -> str:
        """Return the line of the samples file, with the field names of GRPO's samples."""
        fields = {
            "step": step,
            "prompt": self.prompt.text,
            "answer": self.text,
            "finishReason": "stop" if self.is_ended else "length",
            "tokens": self.tokens,
            "reward": self.reward,
        }
        return json.dumps(fields, ensure_ascii=False)


@dataclass(frozen=True, slots=True)
class EvalPrompts:
    """The prompts of a run's evaluations. Rank 0 alone has `records` and `decode`."""

    settings: EvalAnswers
    tokens: tuple[tuple[int, ...], ...]
    stop_tokens: tuple[int, ...]
    records: Sequence[Prompt]
    decode: Callable[[Sequence[int]], str]
    folder: Path

    def evaluate_answers(
        self, step: int, engine: NextTokenModel, share: BatchShare, after_each_token: Callable[[], object]
    ) -> Mapping[str, float]:
        """Generate an answer to each prompt on all ranks; return the mean score on rank 0."""
        if not self.tokens:
            return {}
        bounds = AnswerBounds(self.stop_tokens, self.settings.max_new_tokens)
        token_lists = generate_answers(engine, self.tokens, bounds, share, after_each_token)
        scored_answers = list(self._score_answers(token_lists))
        if not scored_answers:
            return {}
        self._write_samples(step, scored_answers)
        return {
            f"{MEAN}@1": sum(answer.reward for answer in scored_answers) / len(scored_answers),
            "evalAnswerTokens": float(sum(scored.tokens for scored in scored_answers)),
            "evalTruncated": sum(not scored.is_ended for scored in scored_answers) / len(scored_answers),
        }

    def _score_answers(self, token_lists: Sequence[Sequence[int]]) -> Iterator[AnsweredPrompt]:
        score = _build_score(self.settings)
        # Other ranks have no records.
        for prompt, tokens in zip(self.records, token_lists, strict=False):
            text = self.decode(tokens)
            reward = score(_build_completion(prompt, text, len(tokens), self.settings))
            yield AnsweredPrompt(prompt, text, len(tokens), tokens[-1] in self.stop_tokens, reward)

    def _write_samples(self, step: int, scored_answers: Sequence[AnsweredPrompt]) -> None:
        lines = [answer.sample_line(step) for answer in scored_answers]
        sys.stdout.write("".join(f"{line}\n" for line in lines[:_SHOWN]))
        write_lines(Disk(), self.folder / _SAMPLES / f"eval-step-{step}.jsonl", lines)


def read_eval_prompts(spec: Spec, recipe: EncodingRecipe) -> list[Prompt]:
    """Read the first prompts of each set, and refuse records that no answer can be scored against."""
    settings = spec.training.eval_answers
    most_tokens = spec.data.max_length - settings.max_new_tokens
    records = [
        prompt
        for dataset in prompt_sets(spec)
        for prompt in read_prompts(_first_records(dataset, settings.prompts), recipe, most_tokens)
    ]
    for prompt in records:
        _refuse_without_reference(prompt, settings)
    return records


def _first_records(dataset: Dataset, most_records: int) -> Dataset:
    return dataset.model_copy(update={"max_examples": min(most_records, dataset.max_examples or most_records)})


def _refuse_without_reference(prompt: Prompt, settings: EvalAnswers) -> None:
    """Raise BadData for a record without a reference: before the first step, not at the first evaluation."""
    try:
        _build_score(settings)(_build_completion(prompt, "", 0, settings))
    except RewardFailed as failed:
        raise BadData(f"{prompt.place}: {failed}; set training.evalAnswers.reference or columns") from failed


def _build_score(settings: EvalAnswers) -> ScoreFunction:
    return built_in_score(Reward(name=settings.reward, reference=settings.reference))


def _build_completion(prompt: Prompt, text: str, tokens: int, settings: EvalAnswers) -> Completion:
    return Completion(prompt.text, text, tokens, settings.max_new_tokens, prompt.fields)
