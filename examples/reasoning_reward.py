"""A reward that needs a package: reasoning-gym scores the answers to the tasks that it makes.

    python reasoning_reward.py basic_arithmetic 2000 > prompts.jsonl

writes prompts, each with the entry of its task; a job reads them as data and names this file as its reward:

    data: {train: [{source: prompts.jsonl, format: Prompts}]}
    grpo: {rewards: [{module: "reasoning_reward:score", modulePath: FOLDER, metricName: arithmetic}]}
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Sequence
from typing import Any

# This import takes seconds, at times half a minute. The job's startTimeoutSeconds limits it, not timeoutSeconds.
import reasoning_gym

_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")


def score(completions: Sequence[str], task: Sequence[str], entry: Sequence[str], **_: Any) -> list[float]:
    """Score completions by the rules of their tasks; some tasks give a part of 1 for a part of an answer."""
    scores = []
    for completion, name, entry_text in zip(completions, task, entry, strict=True):
        task_entry = json.loads(entry_text)
        scores.append(
            float(reasoning_gym.get_score_answer_fn(name)(_final_answer(completion, task_entry["answer"]), task_entry))
        )
    return scores


def _final_answer(completion: str, reference: str) -> str:
    """Return the last number of a completion where the reference is a number, else the whole completion."""
    numbers = _NUMBER.findall(completion)
    return numbers[-1] if numbers and _NUMBER.fullmatch(reference) else completion.strip()


def write_prompts(task: str, count: int) -> None:
    """Print records for `data.train` with format Prompts."""
    for task_entry in reasoning_gym.create_dataset(task, size=count, seed=0):
        record = {
            "prompt": [{"role": "user", "content": task_entry["question"]}],
            "task": task,
            "entry": json.dumps(task_entry, default=str),
            "answer": task_entry["answer"],
        }
        sys.stdout.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    write_prompts(sys.argv[1], int(sys.argv[2]))
