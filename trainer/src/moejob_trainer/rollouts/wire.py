"""Requests to an engine and its replies: the JSON of the path of vLLM that takes and gives token ids. Pure.

A label names weights by their version and the trainer's start that published them, such as `12.3f9a01bc`. After a
restart from a checkpoint, version 12 has other weights than before, and another label.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError

from moejob_api.contract.answers import AnswerRequest, EngineAnswer, WeightSpan
from moejob_api.contract.publications import PublicationReport
from moejob_trainer.rollouts.interface import Answer, FinishReason, Floats, Request, Sampling, Tokens
from moejob_trainer.rollouts.routed_experts import Array, BadRouting, routed_experts

# vLLM's own path, which returns log-probabilities of a prompt, too.
PROBE = "/inference/v1/generate"
# The label of weights whose trainer ended in the middle of an update. vLLM calls the weights of its start `default`.
UNFINISHED = "unfinished"
# Names in one sentence; a model without all of its experts lacks thousands.
_NAMED = 8
_FINISHED = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}


class BadAnswer(ValueError):
    """A reply that does not fit its request."""


@dataclass(frozen=True, slots=True)
class WeightsLabel:
    """The name of the weights that a trainer has published."""

    version: int
    run: str

    def __str__(self) -> str:
        return f"{self.version}.{self.run}"


class _Model(BaseModel):
    model_config = ConfigDict(frozen=True)


T = TypeVar("T", bound=BaseModel)


class _LogProbability(_Model):
    logprob: float


class _Probed(_Model):
    # For each token of the prompt, by token; None for the first one, which nothing predicts.
    prompt_logprobs: tuple[dict[int, _LogProbability] | None, ...]


class WeightInfo(_Model):
    """The reply of /weight_info."""

    weight_version: str


def were_given(name: str) -> bool:
    """Return whether weights of this name came from a trainer, at any start of it."""
    return name == UNFINISHED or name.partition(".")[0].isdigit()


def answer_body(request: Request, sampling: Sampling) -> dict[str, Any]:
    """Return the request for one answer."""
    asked = AnswerRequest(
        prompt=request.prompt.astype("<i4").tobytes(),
        seed=request.seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_new_tokens,
        stop_tokens=tuple(sampling.stop_tokens),
    )
    return asked.model_dump(mode="json")


def probe_body(tokens: Tokens) -> dict[str, Any]:
    """Return the request for the log-probabilities of given tokens."""
    params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
    return {"token_ids": tokens.tolist(), "sampling_params": params}


def read_answer(request: Request, sampling: Sampling, body: bytes, run: str) -> Answer:
    """Return the answer to a request; BadAnswer where the engine's weights are not of this run of the trainer."""
    found = _parsed(EngineAnswer, body)
    tokens, log_probabilities = (_array(found.tokens, "<i4"), _array(found.log_probabilities, "<f4"))
    count = len(tokens)
    if found.finish_reason not in _FINISHED:
        raise BadAnswer(f"an answer ended with {found.finish_reason!r}")
    if len(log_probabilities) != count:
        raise BadAnswer(f"{count} tokens came with {len(log_probabilities)} log-probabilities")
    if not np.isfinite(log_probabilities).all():
        raise BadAnswer(f"{int((~np.isfinite(log_probabilities)).sum())} of {count} log-probabilities are no numbers")
    return Answer(
        request=request,
        tokens=tokens.astype(np.int32),
        log_probabilities=log_probabilities.astype(np.float32),
        versions=_versions(found.spans, count, run),
        finish_reason=_FINISHED[found.finish_reason],
        routing=_routing(found.routed_experts, len(request.prompt) + count, sampling),
    )


def _array(numbers: bytes, kind: str) -> Array:
    if len(numbers) % np.dtype(kind).itemsize:
        raise BadAnswer(f"{len(numbers)} bytes are no whole numbers of {np.dtype(kind).itemsize}")
    return np.frombuffer(numbers, kind)


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


def read_publication(body: bytes) -> PublicationReport:
    """Return the report of an engine on a publication."""
    return _parsed(PublicationReport, body)


def publication_problem(url: str, report: PublicationReport) -> str | None:
    """Return a sentence with the names of tensors that are not as they have to be, None when there are none."""
    kinds = (
        (report.missing, "are missing or incomplete"),
        (report.repeated, "came twice"),
        (report.changed, "have other bytes than were sent"),
    )
    problems = [
        f"{len(names)} tensors {problem}: {', '.join(names[:_NAMED])}{' and others' if len(names) > _NAMED else ''}"
        for names, problem in kinds
        if names
    ]
    if not problems:
        return None
    return (
        f"{url} has not been given the whole model, and does not compute with what it was given: {'; '.join(problems)}"
    )


def _versions(spans: tuple[WeightSpan, ...], count: int, run: str) -> Tokens:
    versions = np.full(count, -1, np.int32)
    for span in spans:
        number, _, of_run = span.weights.partition(".")
        if of_run != run or not number.isdigit():
            raise BadAnswer(f"an answer is of weights {span.weights!r}, which this run of the trainer has not sent")
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
