"""The lines between a reward's process and its parent: one JSON object each.

They pass over a socket of their own, so nothing that a user's function prints can be taken for a reply.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict

from pydantic import BaseModel, ConfigDict

from moejob_trainer.rewards.completion import Completion, FailureKind, RewardFailed

# The first line, sent when everything is imported.
READY = 0


class WorkerFailure(BaseModel):
    """A failure as a process reports it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    kind: FailureKind
    message: str

    def as_error(self) -> RewardFailed:
        """Return the exception to raise for it."""
        return RewardFailed(self.kind, self.message)


class WorkerReply(BaseModel):
    """The scores of one request, or its failure."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    # A fork that returns from a user's function answers a request a second time.
    request: int
    scores: tuple[float, ...] = ()
    failure: WorkerFailure | None = None


def request_line(number: int, completions: Sequence[Completion]) -> bytes:
    """Return a request as it is sent; RewardFailed for a record that JSON cannot hold."""
    try:
        text = json.dumps(
            {"request": number, "completions": [asdict(completion) for completion in completions]}, default=str
        )
    except (ValueError, RecursionError) as error:
        raise RewardFailed(FailureKind.RECORD, f"a record cannot be sent to the reward: {error}") from error
    return text.encode() + b"\n"


def read_request(line: str) -> tuple[int, list[Completion]]:
    """Return the number and the completions of a request."""
    values = json.loads(line)
    return values["request"], [Completion(**fields) for fields in values["completions"]]


def read_reply(line: bytes) -> WorkerReply:
    """Return the reply in a line; RewardFailed where the line is none."""
    try:
        return WorkerReply.model_validate_json(line)
    except ValueError as error:
        raise RewardFailed(FailureKind.UNREADABLE, "its process wrote a line that is no answer") from error
