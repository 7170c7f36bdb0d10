"""A reward that asks reasoning-gym what an answer is worth; `rewards` of a job name it with its folder."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module


def score_puzzles(completions: Sequence[str], entry: Sequence[str], **_: object) -> list[float]:
    """Return the score of each answer, by the entry of its puzzle as JSON."""
    entries = [json.loads(text) for text in entry]
    return [
        float(_score_answer(puzzle["task"])(answer.strip(), puzzle))
        for answer, puzzle in zip(completions, entries, strict=True)
    ]


@cache
def _score_answer(task: str) -> Callable[[str, object], float]:
    score: Callable[[str, object], float] = import_module("reasoning_gym").get_score_answer_fn(task)
    return score
