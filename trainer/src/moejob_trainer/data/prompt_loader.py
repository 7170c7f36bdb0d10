"""The prompts of a run in the order in which they are asked, and the cursor that resumes exactly there."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moejob_api.job.model import Data
from moejob_trainer.data.blending import Cursor, DocumentKey, blended_dataset
from moejob_trainer.data.prompt_corpus import PromptCorpus
from moejob_trainer.data.prompts import Prompt
from moejob_trainer.errors import BadData

_CURSOR = "cursor"
# The fix where a state contradicts itself: its files are intact, so another version has written them.
OTHER_CHECKPOINT = "resume with the image that wrote it, or remove this checkpoint to resume from an older one"


@dataclass(frozen=True, slots=True)
class NumberedPrompt:
    """A prompt, and how many were asked before it in the whole run."""

    number: int
    prompt: Prompt
    # Its document in the training data, from which a resumed run reads it again. None: it is of an evaluation.
    key: DocumentKey | None = None


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
            prompts.append(self._read_numbered(number, key))
        return prompts, cursor

    def _read_numbered(self, number: int, key: DocumentKey) -> NumberedPrompt:
        return NumberedPrompt(number, self._sources[key.source].read_prompt(key.document), key)

    def read_again(self, number: int, key: DocumentKey) -> NumberedPrompt:
        """Return a prompt that was taken before; BadData where none can have had that number and key.

        `load_state_dict` comes first: it refuses other data, in which the key names another prompt.
        """
        taken_count = sum(self._cursor.taken)
        if not 0 <= number < taken_count:
            raise BadData(
                f"the checkpoint has the unfinished prompt {number}, and its data cursor stands behind "
                f"{taken_count} prompts; {OTHER_CHECKPOINT}"
            )
        sizes = self._dataset.sizes
        if not (0 <= key.source < len(sizes) and 0 <= key.document < sizes[key.source]):
            raise BadData(
                f"prompt {number} of the checkpoint is document {key.document} of source {key.source}, and the data "
                f"has sources of {', '.join(map(str, sizes))} documents; {OTHER_CHECKPOINT}"
            )
        return self._read_numbered(number, key)

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
