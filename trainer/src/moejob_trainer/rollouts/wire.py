"""Requests to an engine and its answers: the JSON of the path of vLLM that takes and gives token ids. Pure.

A label names weights: their version and the start of the trainer that published them. After a trainer has gone back to
a checkpoint, its version 12 is another one than before.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moejob_trainer.rollouts.interface import Answer, FinishReason, Floats, Request, Sampling, Tokens
from moejob_trainer.rollouts.routed_experts import Array, BadRouting, routed_experts

GENERATE = "/inference/v1/generate"
# The name of weights that a trainer did not give to the end; vLLM calls those that it started with `default`.
UNFINISHED = "unfinished"
_FINISHED = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class BadAnswer(ValueError):
    """An answer that is not what was asked for."""


@dataclass(frozen=True, slots=True)
class WeightsLabel:
    """The name of the weights that a trainer has published."""

    version: int
    run: str

    def __str__(self) -> str:
        return f"{self.version}.{self.run}"


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)


T = TypeVar("T", bound=_Model)


class _LogProbability(_Model):
    logprob: float


class _LogProbabilities(_Model):
    content: tuple[_LogProbability, ...]


class _Span(_Model):
    version: str
    start: int
    end: int


class _Choice(_Model):
    token_ids: tuple[int, ...]
    finish_reason: str
    logprobs: _LogProbabilities
    weight_versions: tuple[_Span, ...]
    routed_experts: str | None = None


class _Generated(_Model):
    choices: Annotated[tuple[_Choice, ...], Field(min_length=1)]


class _Probed(_Model):
    # By token, for each token of the prompt; of the first nothing can be said.
    prompt_logprobs: tuple[dict[int, _LogProbability] | None, ...]


class WeightInfo(_Model):
    """The answer of /weight_info."""

    weight_version: str


def were_given(name: str) -> bool:
    """Return whether weights of this name are a trainer's, whichever start of it they are of."""
    return name == UNFINISHED or name.partition(".")[0].isdigit()


def generate_body(request: Request, sampling: Sampling) -> dict[str, Any]:
    """Return the request for one answer."""
    params = {
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "max_tokens": sampling.max_new_tokens,
        "seed": request.seed,
        # Where an answer ends is the trainer's to say, not the model's files'.
        "stop_token_ids": list(sampling.stop_tokens),
        "ignore_eos": True,
        "logprobs": 0,
        "detokenize": False,
    }
    return {"token_ids": request.prompt.tolist(), "sampling_params": params}


def probe_body(tokens: Tokens) -> dict[str, Any]:
    """Return the request for the log-probabilities of given tokens."""
    params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
    return {"token_ids": tokens.tolist(), "sampling_params": params}


def read_answer(request: Request, sampling: Sampling, body: bytes, run: str) -> Answer:
    """Return the answer to a request; BadAnswer where the engine's weights are not of this run of the trainer."""
    choice = _parsed(_Generated, body).choices[0]
    count = len(choice.token_ids)
    if choice.finish_reason not in _FINISHED:
        raise BadAnswer(f"an answer ended with {choice.finish_reason!r}")
    if len(choice.logprobs.content) != count:
        raise BadAnswer(f"{count} tokens came with {len(choice.logprobs.content)} log-probabilities")
    return Answer(
        request=request,
        tokens=np.array(choice.token_ids, np.int32),
        log_probabilities=np.array([one.logprob for one in choice.logprobs.content], np.float32),
        versions=_versions(choice.weight_versions, count, run),
        finish_reason=_FINISHED[choice.finish_reason],
        routing=_routing(choice.routed_experts, len(request.prompt) + count, sampling),
    )


def read_probe(tokens: Tokens, body: bytes) -> Floats:
    """Return the log-probability of each token but the first. [N - 1]"""
    found = _parsed(_Probed, body).prompt_logprobs
    if len(found) != len(tokens):
        raise BadAnswer(f"{len(tokens)} tokens of a probe came with {len(found)} log-probabilities")
    picked = [
        row[token].logprob for row, token in zip(found[1:], tokens[1:].tolist(), strict=True) if row and token in row
    ]
    if len(picked) != len(tokens) - 1:
        raise BadAnswer("an engine left out log-probabilities of a probe")
    return np.array(picked, np.float32)


def _versions(spans: tuple[_Span, ...], count: int, run: str) -> Tokens:
    versions = np.full(count, -1, np.int32)
    for span in spans:
        number, _, of_run = span.version.partition(".")
        if of_run != run or not number.isdigit():
            raise BadAnswer(f"an answer is of weights {span.version!r}, which this run of the trainer has not sent")
        versions[span.start : span.end] = int(number)
    if (versions < 0).any():
        raise BadAnswer(f"{int((versions < 0).sum())} of {count} tokens are of no version")
    return versions


def _routing(text: str | None, tokens: int, sampling: Sampling) -> Array | None:
    if sampling.routing is None:
        return None
    if text is None:
        raise BadAnswer("an answer came without the experts that were asked for")
    try:
        # The engine has not read the last token.
        return routed_experts(text, tokens - 1, sampling.routing)
    except BadRouting as error:
        raise BadAnswer(str(error)) from None


def _parsed(kind: type[T], body: bytes) -> T:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise BadAnswer(f"an engine answered {body[:200]!r}: {error.errors()[0]['msg']}") from None
