"""The global batches of a run, one after another, as one data-parallel rank needs them.

Which documents a global batch holds is decided by their lengths and the job alone, never by the layout: a run resumed
on other GPUs takes the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import overload

from moejob_api.arithmetic import ceil_div
from moejob_api.derived import global_batch_size
from moejob_api.job import Spec
from moejob_trainer.data.blending import BlendedDataset, Cursor, DocumentKey
from moejob_trainer.data.corpus import Corpus
from moejob_trainer.data.packing import BatchPlan, PackedRows, assign_slots, build_micro_batches
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
class RankBatch:
    """One rank's part of a global batch, and sums over the global batch."""

    micro_batches: list[MicroBatch]
    # Of all ranks: the sum of the loss weights, documents and tokens without padding.
    loss_weight: float
    documents: int
    tokens: int


@dataclass(frozen=True)
class TrainingBatch(RankBatch):
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


def sample_count(blend: BlendedDataset, epochs: float | None) -> int | None:
    """Return the number of documents that a run samples in all; None where its steps are counted instead."""
    return None if epochs is None else max(1, math.ceil(epochs * blend.document_count - 1e-6))


@dataclass(frozen=True)
class TrainingData:
    """The training data of a run and how much of it makes a batch."""

    corpora: Sequence[Corpus]
    blend: BlendedDataset
    size: BatchSize
    # Documents that are sampled in all. None: without end, epoch after epoch.
    sample_count: int | None = None

    def global_batches(self, share: BatchShare, cursor: Cursor | None = None) -> Iterator[TrainingBatch]:
        """Global batches from a cursor on; ends after the last sample."""
        cursor = self.blend.start() if cursor is None else self.blend.validate_cursor(cursor)
        while True:
            keys, cursor = self.select_documents(cursor)
            if not keys:
                return
            yield TrainingBatch(
                **vars(_build_batch(self.corpora, keys, share)), epoch=self.blend.epochs_at(cursor), cursor=cursor
            )

    def count_steps(self) -> int:
        """Return the number of global batches in all; looks at lengths only."""
        if self.sample_count is None:
            raise ValueError("a run without a sample count does not end by itself")
        if not self.size.packing:
            return ceil_div(self.sample_count, self.size.rows)
        steps, (keys, cursor) = 0, self.select_documents(self.blend.start())
        while keys:
            steps += 1
            keys, cursor = self.select_documents(cursor)
        return steps

    def select_documents(self, cursor: Cursor) -> tuple[list[DocumentKey], Cursor]:
        """The documents of the next global batch; none at the end."""
        return self._select_packed(cursor) if self.size.packing else self._select_one_per_row(cursor)

    def _select_one_per_row(self, cursor: Cursor) -> tuple[list[DocumentKey], Cursor]:
        keys: list[DocumentKey] = []
        while len(keys) < self.size.rows and self._has_samples(cursor):
            key, cursor = self.blend.sample_document(cursor)
            keys.append(key)
        return keys, cursor

    def _select_packed(self, cursor: Cursor) -> tuple[list[DocumentKey], Cursor]:
        rows = PackedRows(self.size.rows, self.size.row_tokens)
        keys: list[DocumentKey] = []
        waiting: list[DocumentKey] = []
        for key in cursor.waiting:
            (waiting if rows.place_document(self._document_length(key)) is None else keys).append(key)
        while len(waiting) < max(_LEAST_WAITING, self.size.rows) and self._has_samples(cursor):
            key, cursor = self.blend.sample_document(cursor)
            (waiting if rows.place_document(self._document_length(key)) is None else keys).append(key)
        return keys, replace(cursor, waiting=tuple(waiting))

    def _has_samples(self, cursor: Cursor) -> bool:
        return self.sample_count is None or sum(cursor.taken) < self.sample_count

    def _document_length(self, key: DocumentKey) -> int:
        return int(self.corpora[key.source].lengths[key.document])


def evaluation_batches(corpora: Sequence[Corpus], size: BatchSize, share: BatchShare) -> Iterator[RankBatch]:
    """Every document of the evaluation data once and in order, in batches of about the size of training's."""
    keys: list[DocumentKey] = []
    filled_tokens = 0
    for source, corpus in enumerate(corpora):
        for number, length in enumerate(corpus.lengths.tolist()):
            cost = length if size.packing else size.row_tokens
            if keys and filled_tokens + cost > size.rows * size.row_tokens:
                yield _build_batch(corpora, keys, share)
                keys, filled_tokens = [], 0
            keys.append(DocumentKey(source, number))
            filled_tokens += cost
    yield _build_batch(corpora, keys, share)


def _build_batch(corpora: Sequence[Corpus], keys: Sequence[DocumentKey], share: BatchShare) -> RankBatch:
    lengths = [int(corpora[key.source].lengths[key.document]) for key in keys]
    slots = assign_slots(lengths, share.plan)[share.rank]
    return RankBatch(
        micro_batches=build_micro_batches(_LazyDocuments(corpora, keys), slots, share.plan),
        loss_weight=float(sum(int(corpora[key.source].trained_tokens[key.document]) for key in keys)),
        documents=len(keys),
        tokens=sum(lengths),
    )


class _LazyDocuments(Sequence[Document]):
    """Reads a document when it is asked for: a rank asks for its own only."""

    def __init__(self, corpora: Sequence[Corpus], keys: Sequence[DocumentKey]) -> None:
        self._corpora, self._keys = corpora, keys

    def __len__(self) -> int:
        return len(self._keys)

    @overload
    def __getitem__(self, place: int) -> Document: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[Document]: ...
    def __getitem__(self, place: int | slice) -> Document | Sequence[Document]:
        if isinstance(place, slice):
            return _LazyDocuments(self._corpora, self._keys[place])
        key = self._keys[place]
        return self._corpora[key.source].read_document(key.document, key.source)
