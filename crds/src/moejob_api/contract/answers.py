"""A request for one answer and the answer, as trainer and engines agree on them: JSON, with arrays in base64.

Token ids are little-endian int32, log-probabilities little-endian float32. An object for each would take the server of
an engine 2 ms for an answer of 256 tokens (docs/decisions/answers.md).
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_bytes="base64", val_json_bytes="base64")


class AnswerRequest(_Message):
    """A prompt, and how its answer is sampled and ended."""

    prompt: bytes
    seed: int
    temperature: float
    top_p: float
    max_tokens: int
    stop_tokens: tuple[int, ...]
    # Keys and values are shared by requests of one salt. Absent: by all requests.
    cache_salt: str | None = None


class WeightSpan(_Message):
    """The tokens of an answer that weights of one name chose."""

    weights: str
    start: int
    end: int


class EngineAnswer(_Message):
    """An answer, and the log-probability of each of its tokens."""

    tokens: bytes
    log_probabilities: bytes
    spans: tuple[WeightSpan, ...]
    finish_reason: str
    # A .npy file in base64, as vLLM writes it.
    routed_experts: str | None = None
