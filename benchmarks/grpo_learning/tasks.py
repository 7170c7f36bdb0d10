"""Tasks that a small published model can learn: prompts as a file, and the reward that scores answers.

Sums need no package. Any other task is one of reasoning-gym's: tests/reasoning_tasks.py has its prompts and
scores, from the packages of `make real-models`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SUMS = "sums"
_PROMPTS, _FILE = 4096, "prompts.jsonl"
_TESTS = Path(__file__).parents[2] / "tests"


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
    # Of tests/; it takes seconds.
    from reasoning_tasks import write_prompts  # noqa: PLC0415

    prompts = folder / _FILE
    write_prompts(prompts, name, _PROMPTS, **(settings or {}))
    return Task(name, prompts, {"module": "reasoning_tasks:score_answers", "modulePath": str(_TESTS)})


def _sums(below: int = 20) -> Iterable[dict[str, Any]]:
    """Yield sums that SmolLM2-135M-Instruct gets right about every third time."""
    numbers = random.Random(1)
    for _ in range(_PROMPTS):
        left, right = numbers.randrange(below), numbers.randrange(below)
        yield _record(f"What is {left} + {right}? Answer with the number only.", answer=str(left + right))


def _record(question: str, **fields: str) -> dict[str, Any]:
    return {"prompt": [{"role": "user", "content": question}], **fields}


def _write_prompts(folder: Path, records: Iterable[Mapping[str, Any]]) -> Path:
    file = folder / _FILE
    file.write_text("".join(f"{json.dumps(record)}\n" for record in records), encoding="utf-8")
    return file
