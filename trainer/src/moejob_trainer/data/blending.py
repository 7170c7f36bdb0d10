"""The order of documents: the blend of sources, their epochs, and the cursor that resumes exactly there.

The order is a function of the seed and of the number of sampled documents; it depends on no layout, worker or clock.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import numpy as np
from pydantic import TypeAdapter, ValidationError

from moejob_api.job.model import Data
from moejob_trainer.data.corpus import Corpus
from moejob_trainer.data.prompt_corpus import PromptCorpus
from moejob_trainer.data.shuffling import mix_keys, shuffle_positions
from moejob_trainer.errors import BadData

_BLOCK = 4096


@dataclass(frozen=True, slots=True)
class DocumentKey:
    """One document: its source's place in spec.data, and its place in the source."""

    source: int
    document: int


@dataclass(frozen=True, slots=True)
class Cursor:
    """The samples taken so far. Cursor and blend determine all later samples; every checkpoint has the cursor."""

    # From each source.
    taken: tuple[int, ...]
    # Documents that were sampled but did not fit into a batch yet; the next batch takes them first.
    waiting: tuple[DocumentKey, ...] = ()
    # The fingerprint of the blend that was sampled.
    mixture: str = ""

    def as_json(self) -> str:
        """For a checkpoint."""
        return _cursors.dump_json(self).decode()

    @staticmethod
    def from_json(content: str) -> Cursor:
        """Out of a checkpoint."""
        try:
            return _cursors.validate_json(content)
        except ValidationError as error:
            raise BadData(f"the data cursor of the checkpoint cannot be read: {error}") from error


_cursors = TypeAdapter(Cursor)


@dataclass(frozen=True)
class BlendedDataset:
    """Sources that are sampled in turn, each in proportion to its weight, each in its own epochs.

    Every source gives each of its documents once before it gives one twice. An epoch of the blend is as many samples
    as there are documents; with one source, or weights that follow the sizes, that is every document once.
    """

    sizes: tuple[int, ...]
    weights: tuple[float, ...]
    seed: int
    shuffle: bool
    # Of all that is mixed; a cursor of other data is refused.
    fingerprint: str

    def __post_init__(self) -> None:
        if not self.sizes or min(self.sizes) < 1 or len(self.sizes) != len(self.weights) or min(self.weights) <= 0:
            raise BadData(f"cannot mix sources of {self.sizes} documents with weights {self.weights}")

    @cached_property
    def sampling_shares(self) -> tuple[float, ...]:
        """The part of all samples that each source gets."""
        total = math.fsum(self.weights)
        return tuple(weight / total for weight in self.weights)

    @cached_property
    def document_count(self) -> int:
        """Documents of all sources: the samples of an epoch."""
        return sum(self.sizes)

    def start(self) -> Cursor:
        """Before the first draw."""
        return Cursor(taken=(0,) * len(self.sizes), mixture=self.fingerprint)

    def validate_cursor(self, cursor: Cursor) -> Cursor:
        """Return a cursor of this blend; one of other data is refused, for it would skip some and repeat some."""
        if cursor.mixture != self.fingerprint or len(cursor.taken) != len(self.sizes):
            raise BadData(
                "the data, its weights, its seed or the tokenizer changed since the checkpoint, so the run cannot go "
                "on with the samples it has not seen; put them back, or start a new job with checkpoint.resumeFrom, "
                "which takes the weights alone"
            )
        return cursor

    def epochs_at(self, cursor: Cursor) -> float:
        """Passes over the data so far."""
        return (sum(cursor.taken) - len(cursor.waiting)) / self.document_count

    def sample_document(self, cursor: Cursor) -> tuple[DocumentKey, Cursor]:
        """Return the next document, and the cursor behind it."""
        source = self._next_source(cursor.taken)
        number = cursor.taken[source]
        taken = (*cursor.taken[:source], number + 1, *cursor.taken[source + 1 :])
        return DocumentKey(source, self._document_index(source, number)), replace(cursor, taken=taken)

    def _next_source(self, taken: Sequence[int]) -> int:
        """Return the source that is furthest behind its share, the first of equals."""
        if len(taken) == 1:
            return 0
        due = sum(taken) + 1
        return max(range(len(taken)), key=lambda source: self.sampling_shares[source] * due - taken[source])

    def _document_index(self, source: int, number: int) -> int:
        epoch, position = divmod(number, self.sizes[source])
        if not self.shuffle:
            return position
        block, offset = divmod(position, _BLOCK)
        return _shuffled_block(self.sizes[source], mix_keys(self.seed, source, epoch), block)[offset]


def blended_dataset(sources: Sequence[Corpus | PromptCorpus], data: Data) -> BlendedDataset:
    """Return the blend of the training data, documents or prompts."""
    weights = tuple(dataset.weight for dataset in data.train)
    identity = (*(source.report.fingerprint for source in sources), weights, data.seed, data.shuffle)
    return BlendedDataset(
        sizes=tuple(map(len, sources)),
        weights=weights,
        seed=data.seed,
        shuffle=data.shuffle,
        fingerprint=hashlib.sha256(repr(identity).encode()).hexdigest()[:16],
    )


@lru_cache(maxsize=256)
def _shuffled_block(size: int, key: int, block: int) -> list[int]:
    """Shuffle a block of positions at once: one position at a time costs a hundred times as much."""
    positions = np.arange(block * _BLOCK, min(size, (block + 1) * _BLOCK))
    return [int(position) for position in shuffle_positions(positions, size, key)]
