"""A process that scores: `python -m moejob_trainer.rewards.worker`. One JSON object a line comes in, one goes out.

The first line is the reward of the spec. It may raise, hang or be killed, and hurts its batch alone.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from moejob_api.job.grpo import Reward
from moejob_trainer.rewards.built_in import built_in
from moejob_trainer.rewards.completion import Completion
from moejob_trainer.rewards.functions import function, scores

Scores = Callable[[Sequence[Completion]], list[float]]


def scoring(reward: Reward) -> Scores:
    """Return the scorer of a batch."""
    if reward.module is not None:
        found = function(reward.module, reward.module_path)
        return lambda completions: scores(found, completions)
    score = built_in(reward)
    return lambda completions: [score(completion) for completion in completions]


def serve(lines: TextIO, answers: TextIO) -> None:
    """Score batch after batch until there are no more."""
    made: Scores | None = None
    reward = Reward.model_validate_json(lines.readline())
    for line in lines:
        try:
            made = made or scoring(reward)
            told: dict[str, object] = {"scores": made([Completion(**each) for each in json.loads(line)])}
        # Whatever a user's function raises is an answer, not the end of this process.
        except Exception as error:  # noqa: BLE001
            told = {"error": f"{type(error).__name__}: {error}"[:500]}
        answers.write(json.dumps(told, default=float) + "\n")
        answers.flush()


if __name__ == "__main__":
    # What a user's function prints must not get among the answers.
    own = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    serve(sys.stdin, own)
