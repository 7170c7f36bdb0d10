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
from moejob_trainer.rollouts.carried_answers import AnswerSegment
from moejob_trainer.rollouts.interface import FinishReason, Floats, GenerationRequest, SamplingParams, Tokens
from moejob_trainer.rollouts.routed_experts import Array, BadRouting, decode_routed_experts

# vLLM's own path, which returns log-probabilities of a prompt, too.
PROBE_PATH = "/inference/v1/generate"
# The label of weights whose trainer ended in the middle of an update. vLLM calls the weights of its start `default`.
UNFINISHED_LABEL = "unfinished"
# Names in one sentence; a model without all of its experts lacks thousands.
_NAMED = 8
_FINISH_REASONS = {"stop": FinishReason.STOP, "length": FinishReason.LENGTH}
# The reason of a request that the engine had to end.
_ABORTED = "abort"
# Before all answers, whose priority is 0: a probe behind thousands of unfinished answers would wait for minutes.
_PROBE_PRIORITY = -1


class BadReply(ValueError):
    """A reply that does not fit its request."""


@dataclass(frozen=True, slots=True)
class WeightsLabel:
    """The name of the weights that a trainer has published."""

    version: int
    run: str

    def __str__(self) -> str:
        return f"{self.version}.{self.run}"


class _WireModel(BaseModel):
    model_config = ConfigDict(frozen=True)


T = TypeVar("T", bound=BaseModel)


class _LogProbability(_WireModel):
    logprob: float


class _ProbeReply(_WireModel):
    # For each token of the prompt, by token; None for the first one, which nothing predicts.
    prompt_logprobs: tuple[dict[int, _LogProbability] | None, ...]


class CacheReset(_WireModel):
    """The reply of /reset_prefix_cache."""

    success: bool


class WeightInfo(_WireModel):
    """The reply of /weight_info."""

    weight_version: str


def is_trainer_label(name: str) -> bool:
    """Return whether weights of this name came from a trainer, at any start of it."""
    return name == UNFINISHED_LABEL or name.partition(".")[0].isdigit()


def answer_request_body(
    request: GenerationRequest, sampling: SamplingParams, cache_salt: str | None = None
) -> dict[str, Any]:
    """Return the request for one answer; keys and values are shared by requests of one salt."""
    request_body = AnswerRequest(
        prompt=request.prompt.astype("<i4").tobytes(),
        seed=request.seed,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        max_tokens=sampling.max_new_tokens,
        stop_tokens=tuple(sampling.stop_tokens),
        cache_salt=cache_salt,
    )
    return request_body.model_dump(mode="json", exclude_none=True)


def probe_request_body(tokens: Tokens) -> dict[str, Any]:
    """Return the request for the log-probabilities of given tokens."""
    params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
    return {"token_ids": tokens.tolist(), "sampling_params": params, "priority": _PROBE_PRIORITY}


def read_answer(
    request: GenerationRequest, sampling: SamplingParams, body: bytes, label: WeightsLabel, *, is_stopped: bool = False
) -> AnswerSegment:
    """Return the tokens of a reply; BadReply where they do not fit the request or the weights that were published.

    Only an engine that was stopped may reply before the end of an answer.
    """
    reply = _parse_reply(EngineAnswer, body)
    tokens, log_probabilities = (_parse_numbers(reply.tokens, "<i4"), _parse_numbers(reply.log_probabilities, "<f4"))
    count = len(tokens)
    finish_reason = _FINISH_REASONS.get(reply.finish_reason)
    if finish_reason is None and not (is_stopped and reply.finish_reason == _ABORTED):
        raise BadReply(f"an answer ended with {reply.finish_reason!r}")
    if len(log_probabilities) != count:
        raise BadReply(f"{count} tokens came with {len(log_probabilities)} log-probabilities")
    if not np.isfinite(log_probabilities).all():
        raise BadReply(f"{int((~np.isfinite(log_probabilities)).sum())} of {count} log-probabilities are no numbers")
    _check_count(tokens, finish_reason, sampling)
    return AnswerSegment(
        tokens=tokens.astype(np.int32),
        log_probabilities=log_probabilities.astype(np.float32),
        versions=_token_versions(reply.spans, count, label),
        finish_reason=finish_reason,
        routing=_answer_routing(reply.routed_experts, len(request.prompt) + count, sampling) if count else None,
    )


def _check_count(tokens: Array, finish_reason: FinishReason | None, sampling: SamplingParams) -> None:
    """Refuse more tokens than were asked for, no token, and a part that has all tokens of an answer."""
    count = len(tokens)
    if count > sampling.max_new_tokens:
        raise BadReply(f"an answer has {count} tokens where at most {sampling.max_new_tokens} were asked for")
    if finish_reason is not None:
        if not count:
            raise BadReply("an answer has ended without a token")
    elif count == sampling.max_new_tokens or np.isin(tokens, sampling.stop_tokens).any():
        raise BadReply(f"an answer of {count} tokens is complete, and the engine calls it unfinished")


def _parse_numbers(numbers: bytes, kind: str) -> Array:
    if len(numbers) % np.dtype(kind).itemsize:
        raise BadReply(f"{len(numbers)} bytes are no whole numbers of {np.dtype(kind).itemsize}")
    return np.frombuffer(numbers, kind)


def read_probe(tokens: Tokens, body: bytes) -> Floats:
    """Return an engine's log-probability of each token but the first, out of its reply. [N - 1]"""
    prompt_log_probabilities = _parse_reply(_ProbeReply, body).prompt_logprobs
    if len(prompt_log_probabilities) != len(tokens):
        raise BadReply(f"{len(tokens)} tokens of a probe came with {len(prompt_log_probabilities)} log-probabilities")
    picked = [
        row[token].logprob
        for row, token in zip(prompt_log_probabilities[1:], tokens[1:].tolist(), strict=True)
        if row and token in row
    ]
    if len(picked) != len(tokens) - 1:
        raise BadReply("an engine left out log-probabilities of a probe")
    return np.array(picked, np.float32)


def read_cache_reset(body: bytes) -> bool:
    """Return whether an engine has forgotten keys and values of older weights."""
    return _parse_reply(CacheReset, body).success


def read_publication(body: bytes) -> PublicationReport:
    """Return the report of an engine on a publication."""
    return _parse_reply(PublicationReport, body)


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


def _token_versions(spans: tuple[WeightSpan, ...], count: int, label: WeightsLabel) -> Tokens:
    """Return the version of each token: of this run, and none that is not published yet."""
    versions = np.full(count, -1, np.int32)
    for span in spans:
        number, _, of_run = span.weights.partition(".")
        if of_run != label.run or not number.isdecimal() or int(number) > label.version:
            raise BadReply(f"an answer is of weights {span.weights!r}, which this run of the trainer has not sent")
        if not 0 <= span.start <= span.end <= count:
            raise BadReply(f"an answer of {count} tokens has weights of its tokens {span.start} to {span.end}")
        versions[span.start : span.end] = int(number)
    if (versions < 0).any():
        raise BadReply(f"{int((versions < 0).sum())} of {count} tokens are of no version")
    return versions


def _answer_routing(text: str | None, tokens: int, sampling: SamplingParams) -> Array | None:
    if sampling.routing is None:
        return None
    if text is None:
        raise BadReply("an answer came without the experts that were asked for")
    try:
        # The engine has not read the last token.
        return decode_routed_experts(text, tokens - 1, sampling.routing)
    except BadRouting as error:
        raise BadReply(str(error)) from None


def _parse_reply(kind: type[T], body: bytes) -> T:
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise BadReply(f"an engine answered {body[:200]!r}: {error.errors()[0]['msg']}") from None
