"""Greedy decoding with the model that is being trained: each answer takes the likeliest token until its end or bound.

There is no cache of keys and values. For each new token all unfinished answers go through the model again, in the
micro batches and the layout of training. So decoding takes no more memory than training, and suits a few short
answers only. Every rank gets every token, and so all answers.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from moejob_trainer.data.packing import assign_slots, build_micro_batches
from moejob_trainer.data.stream import BatchShare
from moejob_trainer.training import Document, MicroBatch


class NextTokenModel(Protocol):
    """A model spread over ranks, all of which call it together."""

    def next_tokens(self, batches: Sequence[MicroBatch], documents: int) -> list[int]:
        """Return the likeliest token behind each document of a global batch, to every rank."""


@dataclass(frozen=True, slots=True)
class AnswerBounds:
    """The ends of an answer."""

    stop_tokens: Collection[int]
    max_new_tokens: int


def generate_answers(
    engine: NextTokenModel,
    prompts: Sequence[Sequence[int]],
    bounds: AnswerBounds,
    share: BatchShare,
    after_each_token: Callable[[], object] = lambda: None,
) -> list[list[int]]:
    """Return the tokens of each prompt's answer, its end included; call back once all answers have one token more."""
    answers: list[list[int]] = [[] for _ in prompts]
    unfinished = [*range(len(prompts))]
    for _ in range(bounds.max_new_tokens):
        if not unfinished:
            break
        tokens = _next_tokens([[*prompts[place], *answers[place]] for place in unfinished], engine, share)
        for place, token in zip(unfinished, tokens, strict=True):
            answers[place].append(token)
        unfinished = [place for place in unfinished if answers[place][-1] not in bounds.stop_tokens]
        after_each_token()
    return answers


def _next_tokens(texts: Sequence[Sequence[int]], engine: NextTokenModel, share: BatchShare) -> list[int]:
    documents = [
        # Weights are those of a loss, and none is computed.
        Document(np.array(tokens, np.int64), np.zeros(len(tokens), np.float32), number)
        for number, tokens in enumerate(texts)
    ]
    slots = assign_slots([len(tokens) for tokens in texts], share.plan)[share.rank]
    return engine.next_tokens(build_micro_batches(documents, slots, share.plan), len(documents))
