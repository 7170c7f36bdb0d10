"""Answers that several engines or versions of weights write: the parts, and the requests that continue them. Pure.

An engine that stops returns the tokens that it has. The rest is requested with these tokens behind the prompt, so the
continuation has read them with its own weights, and each token keeps the log-probability, version and experts of the
weights that chose it. Example: of 100 tokens 30 are there after a prompt of 10; the next request has 40 tokens and asks
for at most 70.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from moejob_trainer.data.shuffling import mix_keys
from moejob_trainer.rollouts.interface import (
    Answer,
    FinishReason,
    Floats,
    GenerationRequest,
    SamplingParams,
    Tokens,
)


@dataclass(frozen=True, slots=True, eq=False)
class AnswerSegment:
    """Tokens that one engine has generated for one request, with its numbers of each. [N]"""

    tokens: Tokens
    log_probabilities: Floats
    versions: Tokens
    # None: the engine was stopped, and the answer has further tokens.
    finish_reason: FinishReason | None
    # Experts of each token of the request and the segment but the last. [P + N - 1, routed layers, k]
    routing: npt.NDArray[Any] | None = None


def continue_request(
    request: GenerationRequest, sampling: SamplingParams, carried: AnswerSegment | None
) -> tuple[GenerationRequest, SamplingParams]:
    """Return the request for the tokens behind those that are there; the request itself where there are none."""
    if carried is None:
        return request, sampling
    count = len(carried.tokens)
    rest = replace(
        request,
        prompt=np.concatenate([request.prompt, carried.tokens]),
        # With the seed of the first part, the continuation would draw the numbers of its first tokens again.
        seed=mix_keys(request.seed, count) % 2**31,
    )
    return rest, replace(sampling, max_new_tokens=sampling.max_new_tokens - count)


def join_segments(carried: AnswerSegment | None, further: AnswerSegment) -> AnswerSegment | None:
    """Return both as one segment; None while there is no token."""
    if carried is None:
        return further if len(further.tokens) else None
    if not len(further.tokens):
        return carried
    return AnswerSegment(
        tokens=np.concatenate([carried.tokens, further.tokens]),
        log_probabilities=np.concatenate([carried.log_probabilities, further.log_probabilities]),
        versions=np.concatenate([carried.versions, further.versions]),
        finish_reason=further.finish_reason,
        routing=_join_routing(carried.routing, further.routing),
    )


def complete_answer(request: GenerationRequest, segment: AnswerSegment | None) -> Answer | None:
    """Return the answer to a request, None where its end is missing."""
    if segment is None or segment.finish_reason is None:
        return None
    return Answer(
        request=request,
        tokens=segment.tokens,
        log_probabilities=segment.log_probabilities,
        versions=segment.versions,
        finish_reason=segment.finish_reason,
        routing=segment.routing,
    )


def _join_routing(carried: npt.NDArray[Any] | None, further: npt.NDArray[Any] | None) -> npt.NDArray[Any] | None:
    """Return the experts with which each token was computed when the token behind it was chosen.

    The continuation has computed the carried tokens again, and reports experts of its own for them.
    """
    if carried is None or further is None:
        return None
    return np.concatenate([carried, further[len(carried) :]])
