"""Turns data sets into corpora: reads, tokenizes on several cores, applies the policy for long documents, counts.

One process of a run prepares; all ranks then open the folders that it names.
"""

from __future__ import annotations

import hashlib
import multiprocessing
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

from transformers import PreTrainedTokenizerBase

from moejob_api.job.model import Data, Dataset, Model, Overlong
from moejob_trainer.data import corpus
from moejob_trainer.data.corpus import Report
from moejob_trainer.data.encoding import Encoder, RecordKind, Sample, encoder
from moejob_trainer.data.file_contents import read_contents
from moejob_trainer.data.hub import HubPins
from moejob_trainer.data.prepared_folder import built, finish
from moejob_trainer.data.records import Record
from moejob_trainer.data.sources import records, source_files
from moejob_trainer.data.tokenizers import CLAIMS, tokenizer
from moejob_trainer.errors import BadData

# Of what is prepared, in the folder of a run.
FOLDER = "data"
# Part of a corpus's name: a version that reads or encodes differently does not use corpora of this one.
_VERSION = 4
_NO_SOURCES: Mapping[str, tuple[Dataset, ...]] = {"train": (), "eval": ()}
_CHUNK = 256
# Starting processes takes seconds; fewer records than these are not worth it.
_ALONE = 16 * _CHUNK

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Recipe:
    """All that decides which tokens a record becomes."""

    model: Model
    data: Data
    # Entries of the model's embedding; a token beyond them is refused. None: not checked.
    vocabulary: int | None = None
    claims: Path = CLAIMS
    # None: whatever the hub holds now.
    pins: HubPins | None = None

    def tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model."""
        return tokenizer(self.model.source, self.model.revision, self.model.trust_remote_code, self.claims)


class Disposition(StrEnum):
    """Decision of the policy for samples that are too long."""

    KEPT = "kept"
    DROPPED = "dropped"
    TRUNCATED = "truncated"
    EMPTIED = "emptied"


@dataclass(frozen=True, slots=True, eq=False)
class Fitted:
    """A sample after the policy; documents are made of those that are kept or truncated."""

    sample: Sample
    fate: Disposition


def prepare(datasets: Sequence[Dataset], recipe: Recipe, folder: Path, workers: int = 1) -> tuple[Path, ...]:
    """Tokenize data sets into folders below `folder`; return these folders in order.

    Existing folders are kept, so that a restarted run begins at once. A data set without documents is refused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    using = recipe.tokenizer()
    return tuple(
        _prepared(dataset, recipe, folder, workers, fingerprint(dataset, recipe, using, folder)) for dataset in datasets
    )


def fitted(sample: Sample, data: Data, place: str) -> Fitted:
    """A sample after data.overlong."""
    length = len(sample.tokens)
    if length <= data.max_length:
        return Fitted(sample, Disposition.KEPT)
    match data.overlong:
        case Overlong.DROP:
            return Fitted(sample, Disposition.DROPPED)
        case Overlong.TRUNCATE:
            cut = Sample(sample.tokens[: data.max_length], sample.trained[: data.max_length])
            return Fitted(cut, Disposition.TRUNCATED if cut.trained_tokens else Disposition.EMPTIED)
        case Overlong.REFUSE:
            raise BadData(
                f"{place} has {length} tokens, data.maxLength is {data.max_length} and data.overlong Refuse; raise "
                "maxLength, or set overlong to Drop or Truncate"
            )


def _prepared(dataset: Dataset, recipe: Recipe, folder: Path, workers: int, identity: str) -> Path:
    def write(building: Path) -> None:
        finish(building, _written(building, dataset, recipe, workers, identity))

    return built(folder / identity[:16], write, corpus.Corpus)


def fingerprint(dataset: Dataset, recipe: Recipe, using: PreTrainedTokenizerBase, folder: Path, *further: int) -> str:
    """Return the hash of everything that determines a data set's corpus. The folder records the files' hashes."""
    data = recipe.data
    parts = (
        *(_VERSION, recipe.vocabulary, data.max_length, data.overlong, data.chat_template),
        # Every field but the weight: it changes how often documents are sampled, not the documents.
        dataset.model_copy(update={"weight": 1.0}).model_dump_json(),
        read_contents(source_files(dataset, recipe.claims), folder),
        *(using.chat_template, using.special_tokens_map, using.is_fast and using.backend_tokenizer.to_str()),
        *(sorted(using.get_vocab().items()), *further),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _written(building: Path, dataset: Dataset, recipe: Recipe, workers: int, identity: str) -> Report:
    fates = Counter[Disposition]()

    def kept() -> Iterator[Sample]:
        for one in encoded(dataset, recipe, workers, partial(_encoded, RecordKind.of(dataset))):
            fates[one.fate] += 1
            if one.fate in (Disposition.KEPT, Disposition.TRUNCATED):
                yield one.sample

    documents, tokens, trained_tokens = corpus.write(building, kept())
    refuse_empty(dataset, fates, recipe.data)
    return Report(
        source=dataset.source,
        split=dataset.split,
        fingerprint=identity,
        records=fates.total(),
        documents=documents,
        dropped=fates[Disposition.DROPPED],
        truncated=fates[Disposition.TRUNCATED],
        emptied=fates[Disposition.EMPTIED],
        tokens=tokens,
        trained_tokens=trained_tokens,
    )


def refuse_empty(dataset: Dataset, fates: Mapping[Disposition, int], data: Data) -> None:
    """BadData where no record of a data set is trained on."""
    name = f"data set {dataset.source} (split {dataset.split})"
    if not any(fates.values()):
        raise BadData(f"{name} is empty; name another, or remove it")
    dropped, emptied = fates.get(Disposition.DROPPED, 0), fates.get(Disposition.EMPTIED, 0)
    if dropped + emptied == sum(fates.values()):
        raise BadData(
            f"none of the {dropped + emptied} records of {name} can be trained on: all are longer than data.maxLength "
            f"{data.max_length} ({dropped} dropped, {emptied} with nothing to train on after truncation); raise "
            "maxLength"
        )


def encoded(
    dataset: Dataset, recipe: Recipe, workers: int, encode: Callable[[Recipe, Sequence[Record]], list[T]]
) -> Iterator[T]:
    """Each record of a data set as `encode`, which other processes import, makes it of a recipe and some records."""
    found = records(dataset, recipe.claims, recipe.pins)
    first = list(islice(found, _ALONE))
    chunks = _chunks(chain(first, found))
    # Workers cache the encoder by recipe, and the list of data sets does not change how records are encoded.
    act = partial(encode, replace(recipe, data=recipe.data.model_copy(update=_NO_SOURCES)))
    if workers == 1 or len(first) < _ALONE:
        return chain.from_iterable(map(act, chunks))
    return chain.from_iterable(_on_all_cores(act, chunks, workers))


def _chunks(found: Iterable[Record]) -> Iterator[list[Record]]:
    iterator = iter(found)
    while chunk := list(islice(iterator, _CHUNK)):
        yield chunk


def _on_all_cores(
    act: Callable[[Sequence[Record]], list[T]], chunks: Iterable[list[Record]], workers: int
) -> Iterator[list[T]]:
    # Never forked: the process that prepares may already have threads and a GPU.
    context = multiprocessing.get_context("forkserver")
    # Imported once instead of by every worker.
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting = deque[Future[list[T]]]()
        for chunk in chunks:
            waiting.append(pool.submit(act, chunk))
            # Few are read ahead: the data may be larger than memory.
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _encoded(kind: RecordKind, recipe: Recipe, chunk: Sequence[Record]) -> list[Fitted]:
    encode = _encoder(kind, recipe)
    return [fitted(known(encode(record), recipe, record.place), recipe.data, record.place) for record in chunk]


@cache
def _encoder(kind: RecordKind, recipe: Recipe) -> Encoder:
    """Cache the encoder: in a pool every chunk needs it, and a tokenizer takes a second to load."""
    return encoder(kind, recipe.tokenizer(), recipe.data.chat_template)


def known(sample: Sample, recipe: Recipe, place: str) -> Sample:
    """Return the sample; BadData where the model has no embedding for one of its tokens."""
    largest = int(sample.tokens.max())
    if recipe.vocabulary is not None and largest >= recipe.vocabulary:
        raise BadData(
            f"{place} has the token {largest}, and the model {recipe.model.source} knows {recipe.vocabulary}; "
            "tokenizer and model do not belong together"
        )
    return sample
