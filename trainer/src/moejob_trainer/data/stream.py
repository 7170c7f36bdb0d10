"""The global batches of a run, one after another, as one data-parallel rank needs them.

Which documents a global batch holds is decided by their lengths and the job alone, never by the layout: a run resumed
on other GPUs takes the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

from moejob_api.derived import global_batch_size
from moejob_api.job import Spec
from moejob_trainer.data.blending import BlendedDataset, Cursor, Key
from moejob_trainer.data.corpus import Corpus
from moejob_trainer.data.packing import BatchPlan, PackedRows, rank_batch, slots_of_ranks
from moejob_trainer.training import Document, MicroBatch

# A document without room in a batch waits for the next batch; when this many wait, the batch is full.
_LEAST_WAITING = 32


@dataclass(frozen=True, slots=True)
class BatchSize:
    """The size of one optimizer update: rows of that many tokens, filled with documents or holding one each."""

    rows: int
    row_tokens: int
    packing: bool


def batch_size(spec: Spec) -> BatchSize:
    """Return the batch size that a job asks for."""
    return BatchSize(rows=global_batch_size(spec), row_tokens=spec.data.max_length, packing=spec.data.packing)


@dataclass(frozen=True)
class Batch:
    """One rank's part of a global batch, and sums over the global batch."""

    micro_batches: list[MicroBatch]
    # Of all ranks: the sum of the loss weights, documents and tokens without padding.
    loss_weight: float
    documents: int
    tokens: int


@dataclass(frozen=True)
class TrainingBatch(Batch):
    """A global batch of the training data."""

    # Passes over the data, this batch included.
    epoch: float
    # What comes after this batch.
    cursor: Cursor


@dataclass(frozen=True, slots=True)
class BatchShare:
    """The part of every global batch that a rank takes."""

    plan: BatchPlan
    rank: int


def sample_count(mixed: BlendedDataset, epochs: float | None) -> int | None:
    """Return the number of documents that a run samples in all; None where its steps are counted instead."""
    return None if epochs is None else max(1, math.ceil(epochs * mixed.documents - 1e-6))


@dataclass(frozen=True)
class TrainingData:
    """The training data of a run and how much of it makes a batch."""

    corpora: Sequence[Corpus]
    mixture: BlendedDataset
    size: BatchSize
    # Documents that are sampled in all. None: without end, epoch after epoch.
    sample_count: int | None = None

    def batches(self, share: BatchShare, cursor: Cursor | None = None) -> Iterator[TrainingBatch]:
        """Global batches from a cursor on; ends after the last sample."""
        cursor = self.mixture.start() if cursor is None else self.mixture.resumed(cursor)
        while True:
            keys, cursor = self.selected(cursor)
            if not keys:
                return
            yield TrainingBatch(
                **vars(_batch(self.corpora, keys, share)), epoch=self.mixture.epochs(cursor), cursor=cursor
            )

    def steps(self) -> int:
        """Return the number of global batches in all; looks at lengths only."""
        if self.sample_count is None:
            raise ValueError("a run without a sample count does not end by itself")
        if not self.size.packing:
            return -(-self.sample_count // self.size.rows)
        steps, (keys, cursor) = 0, self.selected(self.mixture.start())
        while keys:
            steps += 1
            keys, cursor = self.selected(cursor)
        return steps

    def selected(self, cursor: Cursor) -> tuple[list[Key], Cursor]:
        """The documents of the next global batch; none at the end."""
        return self._packed(cursor) if self.size.packing else self._one_a_row(cursor)

    def _one_a_row(self, cursor: Cursor) -> tuple[list[Key], Cursor]:
        keys: list[Key] = []
        while len(keys) < self.size.rows and self._has_samples(cursor):
            key, cursor = self.mixture.sample(cursor)
            keys.append(key)
        return keys, cursor

    def _packed(self, cursor: Cursor) -> tuple[list[Key], Cursor]:
        rows = PackedRows(self.size.rows, self.size.row_tokens)
        keys: list[Key] = []
        waiting: list[Key] = []
        for key in cursor.waiting:
            (waiting if rows.place(self._length(key)) is None else keys).append(key)
        while len(waiting) < max(_LEAST_WAITING, self.size.rows) and self._has_samples(cursor):
            key, cursor = self.mixture.sample(cursor)
            (waiting if rows.place(self._length(key)) is None else keys).append(key)
        return keys, replace(cursor, waiting=tuple(waiting))

    def _has_samples(self, cursor: Cursor) -> bool:
        return self.sample_count is None or sum(cursor.taken) < self.sample_count

    def _length(self, key: Key) -> int:
        return int(self.corpora[key.source].lengths[key.document])


def evaluation(corpora: Sequence[Corpus], size: BatchSize, share: BatchShare) -> Iterator[Batch]:
    """Every document of the evaluation data once and in order, in batches of about the size of training's."""
    keys: list[Key] = []
    filled = 0
    for source, corpus in enumerate(corpora):
        for number, length in enumerate(corpus.lengths.tolist()):
            cost = length if size.packing else size.row_tokens
            if keys and filled + cost > size.rows * size.row_tokens:
                yield _batch(corpora, keys, share)
                keys, filled = [], 0
            keys.append(Key(source, number))
            filled += cost
    yield _batch(corpora, keys, share)


def _batch(corpora: Sequence[Corpus], keys: Sequence[Key], share: BatchShare) -> Batch:
    lengths = [int(corpora[key.source].lengths[key.document]) for key in keys]
    slots = slots_of_ranks(lengths, share.plan)[share.rank]
    return Batch(
        micro_batches=rank_batch(_Documents(corpora, keys), slots, share.plan),
        loss_weight=float(sum(int(corpora[key.source].trained_tokens[key.document]) for key in keys)),
        documents=len(keys),
        tokens=sum(lengths),
    )


class _Documents(Sequence[Document]):
    """Reads a document when it is asked for: a rank asks for its own only."""

    def __init__(self, corpora: Sequence[Corpus], keys: Sequence[Key]) -> None:
        self._corpora, self._keys = corpora, keys

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, place: int) -> Document: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Document]: ...
    def __getitem__(self, place: int | slice) -> Document | Sequence[Document]:
        if isinstance(place, slice):
            return _Documents(self._corpora, self._keys[place])
        key = self._keys[place]
        return self._corpora[key.source].document(key.document, key.source)
