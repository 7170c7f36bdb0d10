"""The prompts of a run in the order in which they are asked, and the cursor that resumes exactly there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moejob_api.job.model import Data
from moejob_trainer.data.blending import Cursor, blended_dataset
from moejob_trainer.data.prompt_corpus import PromptCorpus
from moejob_trainer.data.prompts import Prompt

_CURSOR = "cursor"


@dataclass(frozen=True, slots=True)
class NumberedPrompt:
    """A prompt, and how many were asked before it in the whole run."""

    number: int
    prompt: Prompt


class PromptLoader:
    """Prompts of several sources, each as often as its weight says."""

    def __init__(self, sources: Sequence[PromptCorpus], data: Data) -> None:
        self._sources, self._dataset = sources, blended_dataset(sources, data)
        self._cursor = self._dataset.start()

    @property
    def epoch(self) -> float:
        """Return the passes over the data so far."""
        return self._dataset.epochs_at(self._cursor)

    def next_prompts(self, count: int) -> list[NumberedPrompt]:
        """Return the next prompts."""
        prompts, self._cursor = self._prompts_after(self._cursor, count)
        return prompts

    def first_prompts(self, count: int) -> list[Prompt]:
        """Return the prompts that the run asks first, wherever it is now."""
        return [numbered.prompt for numbered in self._prompts_after(self._dataset.start(), count)[0]]

    def _prompts_after(self, cursor: Cursor, count: int) -> tuple[list[NumberedPrompt], Cursor]:
        prompts = []
        for _ in range(count):
            number = sum(cursor.taken)
            key, cursor = self._dataset.sample_document(cursor)
            prompts.append(NumberedPrompt(number, self._sources[key.source].read_prompt(key.document)))
        return prompts, cursor

    def peek_prompt(self) -> Prompt:
        """Return the next prompt without taking it."""
        key, _ = self._dataset.sample_document(self._cursor)
        return self._sources[key.source].read_prompt(key.document)

    def state_dict(self) -> Mapping[str, Any]:
        """Return the cursor, which stands behind the last prompt that was taken."""
        return {_CURSOR: self._cursor.as_json()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on behind the last prompt that was asked; other data is refused."""
        self._cursor = self._dataset.validate_cursor(Cursor.from_json(state[_CURSOR]))


def steps_of_epochs(prompts: int, epochs: float, prompts_per_step: int) -> int:
    """Return the steps that ask every prompt this many times."""
    # Less a margin: a rounding error above a whole number must not add a step.
    return max(1, math.ceil(epochs * prompts / prompts_per_step - 1e-6))
