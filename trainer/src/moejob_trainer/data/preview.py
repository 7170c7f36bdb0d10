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
    Extent,
    LeftOut,
    PreviewedExample,
    PreviewedText,
)
from moejob_api.contract.pod_environment import read_spec
from moejob_api.contract.pods import ExitCode
from moejob_api.job import Spec
from moejob_api.job.model import DataFormat, Dataset
from moejob_trainer.data.encoding import RecordKind, Sample, encoder
from moejob_trainer.data.preparation import Disposition, Fitted, Recipe, fitted, known, refuse_empty
from moejob_trainer.data.prompts import fits, read_prompt, refuse_none
from moejob_trainer.data.records import Record
from moejob_trainer.data.sources import records
from moejob_trainer.errors import BadData

# Reasons beyond these are counted, not listed.
_MOST_LEFT_OUT = 10


@dataclass(frozen=True, slots=True)
class Seen:
    """A record after the policy for long records; `length` is its length before the policy."""

    place: str
    length: int
    fitted: Fitted
    # The most that it may have, in words.
    limit: str


@dataclass(slots=True)
class _Counts:
    """Sums over the records of a data set."""

    fates: Counter[Disposition] = field(default_factory=Counter)
    trained_tokens: int = 0
    lengths: list[int] = field(default_factory=list)
    left_out: list[LeftOut] = field(default_factory=list)
    examples: list[PreviewedExample] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Previewer:
    """Reads the data sets of one job with its tokenizer."""

    spec: Spec
    extent: Extent
    recipe: Recipe
    tokenizer: PreTrainedTokenizerBase

    def dataset(self, part: str, dataset: Dataset) -> DatasetPreview:
        """Read, encode and count the records of one data set; BadData where a run would end for it."""
        found = records(dataset, self.recipe.claims)
        counts = _Counts()
        for one in self._seen(dataset, islice(found, self.extent.records)):
            self._count(counts, one)
        is_whole = next(found, None) is None
        if is_whole:
            self._refuse_unusable(dataset, counts.fates)
        lengths, fates = sorted(counts.lengths), counts.fates
        return DatasetPreview(
            part=part,
            source=dataset.source,
            split=dataset.split,
            format=dataset.format,
            records=fates.total(),
            is_whole=is_whole,
            kept=fates[Disposition.KEPT],
            truncated=fates[Disposition.TRUNCATED],
            dropped=fates[Disposition.DROPPED] + fates[Disposition.EMPTIED],
            tokens=sum(lengths),
            trained_tokens=counts.trained_tokens,
            lengths=(lengths[0], median_low(lengths), lengths[-1]) if lengths else None,
            left_out=tuple(counts.left_out),
            examples=tuple(counts.examples),
        )

    def _refuse_unusable(self, dataset: Dataset, fates: Counter[Disposition]) -> None:
        if dataset.format is DataFormat.PROMPTS:
            refuse_none(dataset, fates.total(), fates[Disposition.KEPT], self._room_for_prompts())
        else:
            refuse_empty(dataset, fates, self.spec.data)

    def _room_for_prompts(self) -> int:
        return self.spec.data.max_length - _answer_bound(self.spec)[1]

    def _seen(self, dataset: Dataset, found: Iterator[Record]) -> Iterator[Seen]:
        if dataset.format is DataFormat.PROMPTS:
            yield from map(self._prompt, found)
            return
        data = self.spec.data
        encode = encoder(RecordKind.of(dataset), self.tokenizer, data.chat_template)
        limit = f"data.maxLength is {data.max_length}"
        for record in found:
            sample = known(encode(record), self.recipe, record.place)
            yield Seen(record.place, len(sample.tokens), fitted(sample, data, record.place), limit)

    def _prompt(self, record: Record) -> Seen:
        prompt = read_prompt(record, self.tokenizer, self.recipe)
        tokens = np.array(prompt.tokens, dtype=np.int32)
        sample = Sample(tokens, np.zeros(len(tokens), dtype=np.bool_))
        name, room = _answer_bound(self.spec)[0], self._room_for_prompts()
        is_asked = fits(prompt, room, self.spec.data.overlong)
        fate = Disposition.KEPT if is_asked else Disposition.DROPPED
        return Seen(record.place, len(tokens), Fitted(sample, fate), f"data.maxLength less {name} is {room}")

    def _count(self, counts: _Counts, one: Seen) -> None:
        sample, fate = one.fitted.sample, one.fitted.fate
        counts.fates[fate] += 1
        if fate is not Disposition.KEPT and len(counts.left_out) < _MOST_LEFT_OUT:
            counts.left_out.append(LeftOut(place=one.place, reason=self._reason(one)))
        if fate in (Disposition.DROPPED, Disposition.EMPTIED):
            return
        counts.lengths.append(len(sample.tokens))
        counts.trained_tokens += sample.trained_tokens
        if len(counts.examples) < self.extent.examples:
            counts.examples.append(_example(one.place, sample, self.tokenizer))

    def _reason(self, one: Seen) -> str:
        long = f"{one.length} tokens, {one.limit}"
        match one.fitted.fate:
            case Disposition.TRUNCATED:
                return f"{long}: truncated at the end"
            case Disposition.EMPTIED:
                return f"{long}: dropped, nothing would be left to train on after truncation"
            case _:
                return f"{long}: dropped"


def preview(spec: Spec, extent: Extent, vocabulary: int | None = None) -> DataPreview:
    """Every data set of a job as its run would read it; BadData where the run would end for it."""
    recipe = Recipe(spec.model, spec.data, vocabulary=vocabulary)
    previewer = Previewer(spec, extent, recipe, recipe.tokenizer())
    parts = [(f"train[{index}]", dataset) for index, dataset in enumerate(spec.data.train)]
    parts += [(f"eval[{index}]", dataset) for index, dataset in enumerate(spec.data.eval)]
    return DataPreview(datasets=tuple(previewer.dataset(part, dataset) for part, dataset in parts))


def _answer_bound(spec: Spec) -> tuple[str, int]:
    """Return the field that says how long an answer may be, and its value."""
    if spec.grpo is not None:
        return "grpo.maxNewTokens", spec.grpo.max_new_tokens
    return "training.evalAnswers.maxNewTokens", spec.training.eval_answers.max_new_tokens


def _example(place: str, sample: Sample, using: PreTrainedTokenizerBase) -> PreviewedExample:
    pairs = zip(sample.trained.tolist(), sample.tokens.tolist(), strict=True)
    runs = [(trained, [token for _, token in run]) for trained, run in groupby(pairs, key=lambda pair: pair[0])]
    parts = (PreviewedText(text=_written(tokens, using), trained=trained) for trained, tokens in runs)
    return PreviewedExample(
        place=place, tokens=len(sample.tokens), trained_tokens=sample.trained_tokens, parts=tuple(parts)
    )


def _written(tokens: list[int], using: PreTrainedTokenizerBase) -> str:
    text = using.decode(tokens, clean_up_tokenization_spaces=False)
    return text if isinstance(text, str) else "".join(text)


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the preview, or on standard error what is wrong with the data."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    parser = argparse.ArgumentParser(prog="moejob_trainer.data.preview")
    parser.add_argument("--records", type=int, required=True)
    parser.add_argument("--examples", type=int, required=True)
    parser.add_argument("--vocabulary", type=int)
    asked = parser.parse_args(arguments)
    # The progress of downloads belongs on standard error: the caller parses standard output.
    answer, sys.stdout = sys.stdout, sys.stderr
    try:
        found = preview(read_spec(sys.stdin.read()), Extent(asked.records, asked.examples), asked.vocabulary)
    except BadData as error:
        sys.stderr.write(f"{error}\n")
        return ExitCode.BAD_CONFIGURATION
    answer.write(found.model_dump_json(by_alias=True) + "\n")
    answer.flush()
    return ExitCode.DONE


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    sys.exit(main())
