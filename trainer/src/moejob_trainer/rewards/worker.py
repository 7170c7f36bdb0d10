"""A process that scores: `python -m moejob_trainer.rewards.worker SOCKET`. One line of JSON comes in, one goes out.

The first line is the reward of the spec. A reward may raise, hang or be killed, and costs only its own batch.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import TextIO

from moejob_api.job.grpo import Reward
from moejob_trainer.rewards.built_in import built_in
from moejob_trainer.rewards.completion import Completion, FailureKind, RewardFailed
from moejob_trainer.rewards.confinement import (
    ANSWER_SECONDS,
    Interrupted,
    Interruption,
    confine_built_in,
    end_with_parent,
)
from moejob_trainer.rewards.functions import RewardFunction, described
from moejob_trainer.rewards.messages import READY, WorkerAnswer, WorkerFailure, requested

ScoreBatch = Callable[[Sequence[Completion]], list[float]]


def load_scoring(reward: Reward) -> ScoreBatch:
    """Return the scorer of a batch, everything that it needs imported."""
    if reward.module is not None:
        return RewardFunction(reward).scores
    score = built_in(reward)
    confine_built_in()
    return lambda completions: [score(completion) for completion in completions]


def serve(lines: TextIO, answers: TextIO) -> None:
    """Score batch after batch until the parent closes the connection."""
    interruption, started = Interruption(), os.getpid()
    interruption.listen()
    reward = Reward.model_validate_json(lines.readline())
    seconds = min(ANSWER_SECONDS, reward.timeout_seconds) if reward.module is None else None
    scoring = _loaded(reward)
    if isinstance(scoring, WorkerFailure):
        _send(answers, WorkerAnswer(request=READY, failure=scoring))
        return
    _send(answers, WorkerAnswer(request=READY))
    for line in lines:
        number, completions = requested(line)
        answer = _limited(interruption, seconds, number, partial(scoring, completions))
        # A fork that a user's function forgot to end must not answer for its parent.
        if os.getpid() != started:
            os._exit(0)
        _send(answers, answer)


def _loaded(reward: Reward) -> ScoreBatch | WorkerFailure:
    try:
        return load_scoring(reward)
    except RewardFailed as failed:
        return WorkerFailure(kind=failed.kind, message=str(failed))


def _limited(
    interruption: Interruption, seconds: float | None, number: int, score: Callable[[], list[float]]
) -> WorkerAnswer:
    try:
        with interruption.armed(seconds):
            return _attempted(number, score)
    except Interrupted:
        message = "it was interrupted" if seconds is None else f"one answer took it longer than {seconds} s"
        return WorkerAnswer(request=number, failure=WorkerFailure(kind=FailureKind.TIMEOUT, message=message))


def _attempted(number: int, act: Callable[[], list[float]]) -> WorkerAnswer:
    try:
        return WorkerAnswer(request=number, scores=tuple(act()))
    except RewardFailed as failed:
        failure = WorkerFailure(kind=failed.kind, message=str(failed))
    # Whatever a user's function raises is an answer, not the end of this process.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        failure = WorkerFailure(kind=FailureKind.EXCEPTION, message=described(error))
    return WorkerAnswer(request=number, failure=failure)


def _send(answers: TextIO, answer: WorkerAnswer) -> None:
    answers.write(answer.model_dump_json() + "\n")
    answers.flush()


def main(descriptor: int) -> None:
    """Serve the socket until its other end is closed."""
    end_with_parent()
    with socket.socket(fileno=descriptor) as connection:
        connection.set_inheritable(False)
        stream = connection.makefile("rw", encoding="utf-8", newline="\n")
        serve(stream, stream)


if __name__ == "__main__":
    main(int(sys.argv[1]))
