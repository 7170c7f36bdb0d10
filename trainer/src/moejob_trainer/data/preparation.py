"""Turns data sets into corpora: reads, tokenizes on several cores, applies the policy for long documents, counts.

One process of a run prepares; all ranks then open the folders that it names.
"""

from __future__ import annotations

import hashlib
import multiprocessing
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from enum import StrEnum
from functools import cache, partial
from itertools import chain, islice
from pathlib import Path
from typing import TypeVar

import pyarrow as pa
from transformers import PreTrainedTokenizerBase

from moejob_api.job.model import Data, Dataset, Model, OverlongSamples
from moejob_trainer.data import corpus
from moejob_trainer.data.corpus import CorpusReport
from moejob_trainer.data.encoding import Encoder, RecordKind, Sample, build_encoder
from moejob_trainer.data.file_contents import read_contents
from moejob_trainer.data.hub import HubPins
from moejob_trainer.data.prepared_folder import ensure_prepared_folder, write_report
from moejob_trainer.data.records import Record
from moejob_trainer.data.sources import count_records, read_records, source_files
from moejob_trainer.data.tokenizers import CLAIMS, load_tokenizer
from moejob_trainer.errors import BadData
from moejob_trainer.runtime.heartbeats import ShareCounter, ShareReport, ignore_share

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
class EncodingRecipe:
    """All that decides which tokens a record becomes."""

    model: Model
    data: Data
    # Entries of the model's embedding; a token beyond them is refused. None: not checked.
    vocabulary: int | None = None
    claims: Path = CLAIMS
    # None: whatever the hub holds now.
    pins: HubPins | None = None
    # Takes the share of a data set that is encoded; decides no token.
    report_share: ShareReport = field(default=ignore_share, compare=False)

    def load_tokenizer(self) -> PreTrainedTokenizerBase:
        """The tokenizer of the model."""
        return load_tokenizer(self.model.config_source, self.model.revision, self.model.trust_remote_code, self.claims)


class Disposition(StrEnum):
    """Decision of the policy for samples that are too long."""

    KEPT = "kept"
    DROPPED = "dropped"
    TRUNCATED = "truncated"
    EMPTIED = "emptied"


@dataclass(frozen=True, slots=True, eq=False)
class FittedSample:
    """A sample after the policy; documents are made of those that are kept or truncated."""

    sample: Sample
    disposition: Disposition


def prepare_datasets(
    datasets: Sequence[Dataset], recipe: EncodingRecipe, folder: Path, workers: int = 1
) -> tuple[Path, ...]:
    """Tokenize data sets into folders below `folder`; return these folders in order.

    Existing folders are kept, so that a restarted run begins at once. A data set without documents is refused.
    """
    folder.mkdir(parents=True, exist_ok=True)
    model_tokenizer = recipe.load_tokenizer()
    return tuple(
        _prepare_dataset(
            dataset, recipe, folder, workers, dataset_fingerprint(dataset, recipe, model_tokenizer, folder)
        )
        for dataset in datasets
    )


def fit_sample(sample: Sample, data: Data, place: str) -> FittedSample:
    """A sample after data.overlong."""
    length = len(sample.tokens)
    if length <= data.max_length:
        return FittedSample(sample, Disposition.KEPT)
    match data.overlong:
        case OverlongSamples.DROP:
            return FittedSample(sample, Disposition.DROPPED)
        case OverlongSamples.TRUNCATE:
            truncated_sample = Sample(sample.tokens[: data.max_length], sample.trained_mask[: data.max_length])
            return FittedSample(
                truncated_sample, Disposition.TRUNCATED if truncated_sample.trained_tokens else Disposition.EMPTIED
            )
        case OverlongSamples.REFUSE:
            raise BadData(
                f"{place} has {length} tokens, data.maxLength is {data.max_length} and data.overlong Refuse; raise "
                "maxLength, or set overlong to Drop or Truncate"
            )


def _prepare_dataset(dataset: Dataset, recipe: EncodingRecipe, folder: Path, workers: int, identity: str) -> Path:
    def write_folder(building: Path) -> None:
        write_report(building, _write_dataset(building, dataset, recipe, workers, identity))

    return ensure_prepared_folder(folder / identity[:16], write_folder, corpus.Corpus)


def dataset_fingerprint(
    dataset: Dataset, recipe: EncodingRecipe, model_tokenizer: PreTrainedTokenizerBase, folder: Path, *further: int
) -> str:
    """Return the hash of everything that determines a data set's corpus. The folder records the files' hashes."""
    data = recipe.data
    parts = (
        *(_VERSION, recipe.vocabulary, data.max_length, data.overlong, data.chat_template),
        # Every field but the weight: it changes how often documents are sampled, not the documents.
        dataset.model_copy(update={"weight": 1.0}).model_dump_json(),
        read_contents(source_files(dataset, recipe.claims), folder),
        *(
            model_tokenizer.chat_template,
            model_tokenizer.special_tokens_map,
            model_tokenizer.is_fast and model_tokenizer.backend_tokenizer.to_str(),
        ),
        *(sorted(model_tokenizer.get_vocab().items()), *further),
    )
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def _write_dataset(
    building: Path, dataset: Dataset, recipe: EncodingRecipe, workers: int, identity: str
) -> CorpusReport:
    dispositions = Counter[Disposition]()
    counter = ShareCounter(countable_records(dataset, recipe), recipe.report_share)

    def kept_samples() -> Iterator[Sample]:
        for fitted_sample in encode_records(
            dataset, recipe, workers, partial(_encode_chunk, RecordKind.of_dataset(dataset))
        ):
            dispositions[fitted_sample.disposition] += 1
            counter.add(1)
            if fitted_sample.disposition in (Disposition.KEPT, Disposition.TRUNCATED):
                yield fitted_sample.sample

    documents, tokens, trained_tokens = corpus.write_documents(building, kept_samples())
    refuse_empty(dataset, dispositions, recipe.data)
    return CorpusReport(
        source=dataset.source,
        split=dataset.split,
        fingerprint=identity,
        records=dispositions.total(),
        documents=documents,
        dropped=dispositions[Disposition.DROPPED],
        truncated=dispositions[Disposition.TRUNCATED],
        emptied=dispositions[Disposition.EMPTIED],
        tokens=tokens,
        trained_tokens=trained_tokens,
    )


def countable_records(dataset: Dataset, recipe: EncodingRecipe) -> int:
    """Return how many records there are; 0 where that is unknown, or where reading will find the fault of a file."""
    try:
        return count_records(dataset, recipe.claims) or 0
    except (BadData, OSError, pa.ArrowException):
        return 0


def refuse_empty(dataset: Dataset, dispositions: Mapping[Disposition, int], data: Data) -> None:
    """BadData where no record of a data set is trained on."""
    name = f"data set {dataset.source} (split {dataset.split})"
    if not any(dispositions.values()):
        raise BadData(f"{name} is empty; name another, or remove it")
    dropped_count, emptied_count = dispositions.get(Disposition.DROPPED, 0), dispositions.get(Disposition.EMPTIED, 0)
    if dropped_count + emptied_count == sum(dispositions.values()):
        raise BadData(
            f"none of the {dropped_count + emptied_count} records of {name} can be trained on: all are longer than "
            f"data.maxLength {data.max_length} ({dropped_count} dropped, {emptied_count} with nothing to train on "
            "after truncation); raise "
            "maxLength"
        )


def encode_records(
    dataset: Dataset,
    recipe: EncodingRecipe,
    workers: int,
    encode: Callable[[EncodingRecipe, Sequence[Record]], list[T]],
) -> Iterator[T]:
    """Each record of a data set as `encode`, which other processes import, makes it of a recipe and some records."""
    all_records = read_records(dataset, recipe.claims, recipe.pins)
    first = list(islice(all_records, _ALONE))
    chunks = _split_into_chunks(chain(first, all_records))
    # Workers cache the encoder by recipe, and the list of data sets does not change how records are encoded.
    encode_chunk = partial(
        encode, replace(recipe, data=recipe.data.model_copy(update=_NO_SOURCES), report_share=ignore_share)
    )
    if workers == 1 or len(first) < _ALONE:
        return chain.from_iterable(map(encode_chunk, chunks))
    return chain.from_iterable(_encode_on_all_cores(encode_chunk, chunks, workers))


def _split_into_chunks(all_records: Iterable[Record]) -> Iterator[list[Record]]:
    iterator = iter(all_records)
    while chunk := list(islice(iterator, _CHUNK)):
        yield chunk


def _encode_on_all_cores(
    encode_chunk: Callable[[Sequence[Record]], list[T]], chunks: Iterable[list[Record]], workers: int
) -> Iterator[list[T]]:
    # Never forked: the process that prepares may already have threads and a GPU.
    context = multiprocessing.get_context("forkserver")
    # Imported once instead of by every worker.
    context.set_forkserver_preload([__name__])
    with ProcessPoolExecutor(workers, mp_context=context) as pool:
        waiting = deque[Future[list[T]]]()
        for chunk in chunks:
            waiting.append(pool.submit(encode_chunk, chunk))
            # Few are read ahead: the data may be larger than memory.
            if len(waiting) > 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()


def _encode_chunk(kind: RecordKind, recipe: EncodingRecipe, chunk: Sequence[Record]) -> list[FittedSample]:
    encode = _cached_encoder(kind, recipe)
    return [
        fit_sample(require_known_tokens(encode(record), recipe, record.place), recipe.data, record.place)
        for record in chunk
    ]


@cache
def _cached_encoder(kind: RecordKind, recipe: EncodingRecipe) -> Encoder:
    """Cache the encoder: in a pool every chunk needs it, and a tokenizer takes a second to load."""
    return build_encoder(kind, recipe.load_tokenizer(), recipe.data.chat_template)


def require_known_tokens(sample: Sample, recipe: EncodingRecipe, place: str) -> Sample:
    """Return the sample; BadData where the model has no embedding for one of its tokens."""
    largest = int(sample.tokens.max())
    if recipe.vocabulary is not None and largest >= recipe.vocabulary:
        raise BadData(
            f"{place} has the token {largest}, and the model {recipe.model.source} knows {recipe.vocabulary}; "
            "tokenizer and model do not belong together"
        )
    return sample
