"""`python -m moejob_trainer.data.preview`, which `moejob data` starts: a job's data as the model will see it.

Reads a spec as JSON from standard input and writes a DataPreview as JSON; a run reads its data by the same functions.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from statistics import median_low

import numpy as np
from transformers import PreTrainedTokenizerBase

from moejob_api.contract.data_preview import (
    DataPreview,
    DatasetPreview,
    IncompleteRecord,
    PreviewedExample,
    PreviewedText,
    PreviewLimits,
)
from moejob_api.contract.pod_environment import read_spec
from moejob_api.contract.pods import ExitCode
from moejob_api.job import Spec
from moejob_api.job.model import DataFormat, Dataset
from moejob_trainer.data.encoding import RecordKind, Sample, build_encoder
from moejob_trainer.data.preparation import (
    Disposition,
    EncodingRecipe,
    FittedSample,
    fit_sample,
    refuse_empty,
    require_known_tokens,
)
from moejob_trainer.data.prompts import can_ask_prompt, read_prompt, refuse_no_prompts
from moejob_trainer.data.records import Record
from moejob_trainer.data.sources import read_records
from moejob_trainer.errors import BadData

# Reasons beyond these are counted, not listed.
_MOST_LEFT_OUT = 10


@dataclass(frozen=True, slots=True)
class PreviewedRecord:
    """A record after the policy for long records; `length` is its length before the policy."""

    place: str
    length: int
    fitted: FittedSample
    # The most that it may have, in words.
    limit: str


@dataclass(slots=True)
class _PreviewCounts:
    """Sums over the records of a data set."""

    dispositions: Counter[Disposition] = field(default_factory=Counter)
    trained_tokens: int = 0
    lengths: list[int] = field(default_factory=list)
    left_out: list[IncompleteRecord] = field(default_factory=list)
    examples: list[PreviewedExample] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Previewer:
    """Reads the data sets of one job with its tokenizer."""

    spec: Spec
    extent: PreviewLimits
    recipe: EncodingRecipe
    tokenizer: PreTrainedTokenizerBase

    def preview_dataset(self, part: str, dataset: Dataset) -> DatasetPreview:
        """Read, encode and count the records of one data set; BadData where a run would end for it."""
        record_iterator = read_records(dataset, self.recipe.claims)
        counts = _PreviewCounts()
        for record in self._fit_records(dataset, islice(record_iterator, self.extent.records)):
            self._count_record(counts, record)
        is_whole = next(record_iterator, None) is None
        if is_whole:
            self._refuse_unusable(dataset, counts.dispositions)
        lengths, dispositions = sorted(counts.lengths), counts.dispositions
        return DatasetPreview(
            part=part,
            source=dataset.source,
            split=dataset.split,
            format=dataset.format,
            records=dispositions.total(),
            is_whole=is_whole,
            kept=dispositions[Disposition.KEPT],
            truncated=dispositions[Disposition.TRUNCATED],
            dropped=dispositions[Disposition.DROPPED] + dispositions[Disposition.EMPTIED],
            tokens=sum(lengths),
            trained_tokens=counts.trained_tokens,
            lengths=(lengths[0], median_low(lengths), lengths[-1]) if lengths else None,
            left_out=tuple(counts.left_out),
            examples=tuple(counts.examples),
        )

    def _refuse_unusable(self, dataset: Dataset, dispositions: Counter[Disposition]) -> None:
        if dataset.format is DataFormat.PROMPTS:
            refuse_no_prompts(dataset, dispositions.total(), dispositions[Disposition.KEPT], self._room_for_prompts())
        else:
            refuse_empty(dataset, dispositions, self.spec.data)

    def _room_for_prompts(self) -> int:
        return self.spec.data.max_length - _answer_bound(self.spec)[1]

    def _fit_records(self, dataset: Dataset, raw_records: Iterator[Record]) -> Iterator[PreviewedRecord]:
        if dataset.format is DataFormat.PROMPTS:
            yield from map(self._fit_prompt, raw_records)
            return
        data = self.spec.data
        encode = build_encoder(RecordKind.of_dataset(dataset), self.tokenizer, data.chat_template)
        limit = f"data.maxLength is {data.max_length}"
        for record in raw_records:
            sample = require_known_tokens(encode(record), self.recipe, record.place)
            yield PreviewedRecord(record.place, len(sample.tokens), fit_sample(sample, data, record.place), limit)

    def _fit_prompt(self, record: Record) -> PreviewedRecord:
        prompt = read_prompt(record, self.tokenizer, self.recipe)
        tokens = np.array(prompt.tokens, dtype=np.int32)
        sample = Sample(tokens, np.zeros(len(tokens), dtype=np.bool_))
        name, room = _answer_bound(self.spec)[0], self._room_for_prompts()
        is_kept = can_ask_prompt(prompt, room, self.spec.data.overlong)
        disposition = Disposition.KEPT if is_kept else Disposition.DROPPED
        return PreviewedRecord(
            record.place, len(tokens), FittedSample(sample, disposition), f"data.maxLength less {name} is {room}"
        )

    def _count_record(self, counts: _PreviewCounts, record: PreviewedRecord) -> None:
        sample, disposition = record.fitted.sample, record.fitted.disposition
        counts.dispositions[disposition] += 1
        if disposition is not Disposition.KEPT and len(counts.left_out) < _MOST_LEFT_OUT:
            counts.left_out.append(IncompleteRecord(place=record.place, reason=self._reason_left_out(record)))
        if disposition in (Disposition.DROPPED, Disposition.EMPTIED):
            return
        counts.lengths.append(len(sample.tokens))
        counts.trained_tokens += sample.trained_tokens
        if len(counts.examples) < self.extent.examples:
            counts.examples.append(_build_example(record.place, sample, self.tokenizer))

    def _reason_left_out(self, record: PreviewedRecord) -> str:
        long = f"{record.length} tokens, {record.limit}"
        match record.fitted.disposition:
            case Disposition.TRUNCATED:
                return f"{long}: truncated at the end"
            case Disposition.EMPTIED:
                return f"{long}: dropped, nothing would be left to train on after truncation"
            case _:
                return f"{long}: dropped"


def preview_job_data(spec: Spec, extent: PreviewLimits, vocabulary: int | None = None) -> DataPreview:
    """Every data set of a job as its run would read it; BadData where the run would end for it."""
    recipe = EncodingRecipe(spec.model, spec.data, vocabulary=vocabulary)
    previewer = Previewer(spec, extent, recipe, recipe.load_tokenizer())
    parts = [(f"train[{index}]", dataset) for index, dataset in enumerate(spec.data.train)]
    parts += [(f"eval[{index}]", dataset) for index, dataset in enumerate(spec.data.eval)]
    return DataPreview(datasets=tuple(previewer.preview_dataset(part, dataset) for part, dataset in parts))


def _answer_bound(spec: Spec) -> tuple[str, int]:
    """Return the field that says how long an answer may be, and its value."""
    if spec.grpo is not None:
        return "grpo.maxNewTokens", spec.grpo.max_new_tokens
    return "training.evalAnswers.maxNewTokens", spec.training.eval_answers.max_new_tokens


def _build_example(place: str, sample: Sample, tokenizer: PreTrainedTokenizerBase) -> PreviewedExample:
    pairs = zip(sample.trained_mask.tolist(), sample.tokens.tolist(), strict=True)
    runs = [(trained, [token for _, token in run]) for trained, run in groupby(pairs, key=lambda pair: pair[0])]
    parts = (PreviewedText(text=_decode_tokens(tokens, tokenizer), trained=trained) for trained, tokens in runs)
    return PreviewedExample(
        place=place, tokens=len(sample.tokens), trained_tokens=sample.trained_tokens, parts=tuple(parts)
    )


def _decode_tokens(tokens: list[int], tokenizer: PreTrainedTokenizerBase) -> str:
    text = tokenizer.decode(tokens, clean_up_tokenization_spaces=False)
    return text if isinstance(text, str) else "".join(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the preview, or on standard error what is wrong with the data."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(prog="moejob_trainer.data.preview")
    parser.add_argument("--records", type=int, required=True)
    parser.add_argument("--examples", type=int, required=True)
    parser.add_argument("--vocabulary", type=int)
    options = parser.parse_args(arguments)
    # The progress of downloads belongs on standard error: the caller parses standard output.
    output, sys.stdout = sys.stdout, sys.stderr
    try:
        data_preview = preview_job_data(
            read_spec(sys.stdin.read()), PreviewLimits(options.records, options.examples), options.vocabulary
        )
    except BadData as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.BAD_CONFIGURATION
    output.write(data_preview.model_dump_json(by_alias=True) + "\n")
    output.flush()
    return ExitCode.DONE


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    sys.exit(main())
