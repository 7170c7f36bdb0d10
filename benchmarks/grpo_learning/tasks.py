"""Tasks that a small published model can learn: prompts as a file, and the reward that scores answers.

Sums need no package. Any other task is one of reasoning-gym's, which has to be importable here and, by PYTHONPATH, in
the processes of the run that score.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

SUMS = "sums"
_PROMPTS = 4096


@dataclass(frozen=True, slots=True)
class Task:
    """Prompts to answer, and the reward of a job."""

    name: str
    prompts: Path
    reward: Mapping[str, Any]


def write_task(folder: Path, name: str = SUMS, settings: Mapping[str, Any] | None = None) -> Task:
    """Write the prompts of a task; the same ones each time. `settings` are those of reasoning-gym's data set."""
    folder.mkdir(parents=True, exist_ok=True)
    if name == SUMS:
        prompts = _write_prompts(folder, _sums(**(settings or {})))
        return Task(name, prompts, {"name": "numeric"})
    prompts = _write_prompts(folder, _puzzles(name, settings or {}))
    module = {"module": "puzzle_scores:score_puzzles", "modulePath": str(Path(__file__).parent), "reference": "entry"}
    return Task(name, prompts, module)


def _sums(below: int = 20) -> Iterable[dict[str, Any]]:
    """Yield sums that SmolLM2-135M-Instruct gets right about every third time."""
    numbers = random.Random(1)
    for _ in range(_PROMPTS):
        left, right = numbers.randrange(below), numbers.randrange(below)
        yield _record(f"What is {left} + {right}? Answer with the number only.", answer=str(left + right))


def _puzzles(name: str, settings: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    # No other task needs it.
    for entry in import_module("reasoning_gym").create_dataset(name, size=_PROMPTS, seed=1, **settings):
        # One text, for columns of many types are none that a reader of tables knows.
        yield _record(entry["question"], entry=json.dumps({"task": name} | entry, default=str))


def _record(question: str, **fields: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": question}], **fields}


def _write_prompts(folder: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    file = folder / "prompts.jsonl"
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return file
