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
from moejob_trainer.rewards.built_in import built_in_score
from moejob_trainer.rewards.completion import Completion, FailureKind, RewardFailed
from moejob_trainer.rewards.confinement import (
    ANSWER_SECONDS,
    Interrupted,
    Interruption,
    confine_built_in,
    end_with_parent,
)
from moejob_trainer.rewards.functions import RewardFunction, describe_error
from moejob_trainer.rewards.messages import READY, WorkerFailure, WorkerReply, read_request

ScoreBatch = Callable[[Sequence[Completion]], list[float]]


def load_scoring(reward: Reward) -> ScoreBatch:
    """Return the scorer of a batch, everything that it needs imported."""
    if reward.module is not None:
        return RewardFunction(reward).score_batch
    score = built_in_score(reward)
    confine_built_in()
    return lambda completions: [score(completion) for completion in completions]


def serve_requests(lines: TextIO, replies: TextIO) -> None:
    """Score batch after batch until the parent closes the connection."""
    interruption, started = Interruption(), os.getpid()
    interruption.handle_signals()
    reward = Reward.model_validate_json(lines.readline())
    seconds = min(ANSWER_SECONDS, reward.timeout_seconds) if reward.module is None else None
    score_batch = _try_loading(reward)
    if isinstance(score_batch, WorkerFailure):
        _send_reply(replies, WorkerReply(request=READY, failure=score_batch))
        return
    _send_reply(replies, WorkerReply(request=READY))
    for line in lines:
        number, completions = read_request(line)
        reply = _score_within_limit(interruption, seconds, number, partial(score_batch, completions))
        # A fork that a user's function forgot to end must not answer for its parent.
        if os.getpid() != started:
            os._exit(0)
        _send_reply(replies, reply)


def _try_loading(reward: Reward) -> ScoreBatch | WorkerFailure:
    try:
        return load_scoring(reward)
    except RewardFailed as failed:
        return WorkerFailure(kind=failed.kind, message=str(failed))


def _score_within_limit(
    interruption: Interruption, seconds: float | None, number: int, score: Callable[[], list[float]]
) -> WorkerReply:
    try:
        with interruption.allow_interrupts(seconds):
            return _try_scoring(number, score)
    except Interrupted:
        message = "it was interrupted" if seconds is None else f"one answer took it longer than {seconds} s"
        return WorkerReply(request=number, failure=WorkerFailure(kind=FailureKind.TIMEOUT, message=message))


def _try_scoring(number: int, score: Callable[[], list[float]]) -> WorkerReply:
    try:
        return WorkerReply(request=number, scores=tuple(score()))
    except RewardFailed as failed:
        failure = WorkerFailure(kind=failed.kind, message=str(failed))
    # Whatever a user's function raises is an answer, not the end of this process.
    except (Exception, SystemExit) as error:  # noqa: BLE001
        failure = WorkerFailure(kind=FailureKind.EXCEPTION, message=describe_error(error))
    return WorkerReply(request=number, failure=failure)


def _send_reply(replies: TextIO, reply: WorkerReply) -> None:
    replies.write(reply.model_dump_json() + "\n")
    replies.flush()


def main(descriptor: int) -> None:
    """Serve the socket until its other end is closed."""
    end_with_parent()
    with socket.socket(fileno=descriptor) as connection:
        connection.set_inheritable(False)
        stream = connection.makefile("rw", encoding="utf-8", newline="\n")
        serve_requests(stream, stream)


if __name__ == "__main__":
    main(int(sys.argv[1]))
