"""A rollout: spans of tokens one after another, each with its author. Training learns from the model's spans only.

Today a rollout is one prompt and one answer; with tools or several turns it has more spans and nothing else changes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from moejob_trainer.rollouts.interface import Answer, FinishReason, Floats, Tokens
from moejob_trainer.training.micro_batch import Array


class Author(StrEnum):
    """The author of a span."""

    PROMPT = "Prompt"
    MODEL = "Model"


@dataclass(frozen=True, slots=True, eq=False)
class TokenSpan:
    """Tokens of one author, with the engine's log-probability of each and the version that chose it. [N]"""

    author: Author
    tokens: Tokens
    log_probabilities: Floats
    versions: Tokens


@dataclass(frozen=True, slots=True, eq=False)
class Rollout:
    """The spans of one conversation; truncated where the last one reached maxNewTokens before its end."""

    spans: tuple[TokenSpan, ...]
    is_truncated: bool
    # Experts of each token but the last one, which the engine sampled and never read. [N - 1, routed layers, k]
    routing: Array | None = None

    @property
    def tokens(self) -> Tokens:
        """Return the tokens of all spans. [N]"""
        return np.concatenate([span.tokens for span in self.spans])

    @property
    def mask(self) -> Tokens:
        """Return 1 for each token that the model wrote. [N]"""
        return np.concatenate([np.full(len(span.tokens), span.author is Author.MODEL, np.int32) for span in self.spans])

    @property
    def log_probabilities(self) -> Floats:
        """Return the engine's log-probabilities. [N]"""
        return np.concatenate([span.log_probabilities for span in self.spans])


def build_rollout(answer: Answer) -> Rollout:
    """Return the rollout of one prompt and its answer."""
    prompt = answer.request.prompt
    prompt_span = TokenSpan(
        Author.PROMPT, prompt, np.zeros(len(prompt), np.float32), np.full(len(prompt), -1, np.int32)
    )
    answer_span = TokenSpan(Author.MODEL, answer.tokens, answer.log_probabilities, answer.versions)
    return Rollout((prompt_span, answer_span), answer.finish_reason is FinishReason.LENGTH, answer.routing)
