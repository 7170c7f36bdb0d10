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

from moejob_trainer.data.packing import rank_batch, slots_of_ranks
from moejob_trainer.data.stream import BatchShare
from moejob_trainer.training import Document, MicroBatch


class NextTokens(Protocol):
    """A model spread over ranks, all of which call it together."""

    def next_tokens(self, batches: Sequence[MicroBatch], documents: int) -> list[int]:
        """Return the likeliest token behind each document of a global batch, to every rank."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The ends of an answer."""

    stop_tokens: Collection[int]
    max_new_tokens: int


def answers(
    engine: NextTokens,
    prompts: Sequence[Sequence[int]],
    bounds: Bounds,
    share: BatchShare,
    passed: Callable[[], object] = lambda: None,
) -> list[list[int]]:
    """Return the tokens of each prompt's answer, its end included; call back once all answers have one token more."""
    found: list[list[int]] = [[] for _ in prompts]
    asked = [*range(len(prompts))]
    for _ in range(bounds.max_new_tokens):
        if not asked:
            break
        tokens = _next([[*prompts[place], *found[place]] for place in asked], engine, share)
        for place, token in zip(asked, tokens, strict=True):
            found[place].append(token)
        asked = [place for place in asked if found[place][-1] not in bounds.stop_tokens]
        passed()
    return found


def _next(texts: Sequence[Sequence[int]], engine: NextTokens, share: BatchShare) -> list[int]:
    documents = [
        Document(np.array(tokens, np.int64), np.zeros(len(tokens), np.float32), number)
        for number, tokens in enumerate(texts)
    ]
    slots = slots_of_ranks([len(tokens) for tokens in texts], share.plan)[share.rank]
    return engine.next_tokens(rank_batch(documents, slots, share.plan), len(documents))
