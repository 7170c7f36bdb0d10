"""Owns real tasks for rewards: prompts of reasoning-gym in our format, and its own `score_answer` as a reward.

    write_prompts(folder / "sums.jsonl", "basic_arithmetic", count=64)
    rewards: [{module: "reasoning_tasks:score_answers", modulePath: tests}]

Runs where the trainer runs; reasoning-gym comes from the packages of the environment `real`.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from real_models import real_packages

# They have no wheels; tasks that need them are refused by AttributeError.
ABSENT = ("cellpylib", "pycosat", "zss")
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def write_prompts(path: Path, task: str, count: int, **settings: Any) -> None:
    """Write records with a prompt in conversation form, the answer, and the entry that the scorer needs."""
    dataset = _tasks().create_dataset(task, size=count, seed=0, **settings)
    records = [
        {
            "prompt": [{"role": "user", "content": entry["question"]}],
            "answer": entry["answer"],
            "task": task,
            "entry": json.dumps(entry, default=str),
        }
        for entry in dataset
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))


def score_answers(completions: Sequence[str], task: Sequence[str], entry: Sequence[str], **_: Any) -> list[float]:
    """Score completions as reasoning-gym does."""
    entries = [json.loads(written) for written in entry]
    return [
        float(_score_function(name)(extract_answer(completion, answered), answered))
        for completion, name, answered in zip(completions, task, entries, strict=True)
    ]


def extract_answer(completion: str, entry: Mapping[str, Any]) -> str:
    """Return the last number of a completion where a number is asked for, else all of it."""
    numbers = _NUMBER.findall(completion)
    return str(numbers[-1]) if numbers and _NUMBER.fullmatch(entry["answer"]) else completion.strip()


@cache
def _score_function(task: str) -> Callable[[str, Mapping[str, Any]], float]:
    score: Callable[[str, Mapping[str, Any]], float] = _tasks().get_score_answer_fn(task)
    return score


@cache
def _tasks() -> Any:
    for name in ABSENT:
        sys.modules.setdefault(name, ModuleType(name))
    # Last: what the trainer has counts, too.
    sys.path.append(str(real_packages()))
    import reasoning_gym  # noqa: PLC0415 it takes seconds

    return reasoning_gym
