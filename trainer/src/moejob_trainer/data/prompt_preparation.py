"""Turns data sets of prompts into prompt corpora: reads, tokenizes on several cores, leaves out long prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from moejob_api.job.model import Dataset
from moejob_trainer.data import prompt_corpus
from moejob_trainer.data.preparation import Recipe, encoded, fingerprint
from moejob_trainer.data.prepared_folder import built, finish
from moejob_trainer.data.prompt_corpus import PromptLine, PromptReport
from moejob_trainer.data.prompts import fits, read_prompt, refuse_none, refuse_unasked
from moejob_trainer.data.records import Record

# The format of the lines. A resumed run compares the hash of tokens and fields instead.
_VERSION = 1


def prepare_prompts(
    datasets: Sequence[Dataset], recipe: Recipe, most_tokens: int, folder: Path, workers: int = 1
) -> tuple[Path, ...]:
    """Write the prompts of data sets into folders below `folder`; return these in order. Existing ones are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    using = recipe.tokenizer()
    found = []
    for dataset in datasets:
        refuse_unasked(dataset, recipe, most_tokens)
        target = folder / fingerprint(dataset, recipe, using, folder, most_tokens, _VERSION)[:16]
        write = partial(_write, dataset=dataset, recipe=recipe, most_tokens=most_tokens, workers=workers)
        found.append(built(target, write, prompt_corpus.PromptCorpus))
    return tuple(found)


def _write(building: Path, dataset: Dataset, recipe: Recipe, most_tokens: int, workers: int) -> None:
    counts = Counter[bool]()

    def kept() -> Iterator[PromptLine]:
        for one in encoded(dataset, recipe, workers, partial(_lines, most_tokens)):
            counts[one is not None] += 1
            if one is not None:
                yield one

    written, hashed = prompt_corpus.write(building, kept())
    refuse_none(dataset, counts.total(), written, most_tokens)
    report = PromptReport(dataset.source, dataset.split, hashed, counts.total(), written, counts[False])
    finish(building, report)


def _lines(most_tokens: int, recipe: Recipe, chunk: Sequence[Record]) -> list[PromptLine | None]:
    """Return each prompt as it is written; None where it is left out."""
    read = (read_prompt(record, _tokenizer(recipe), recipe) for record in chunk)
    return [prompt_corpus.line(one) if fits(one, most_tokens, recipe.data.overlong) else None for one in read]


@cache
def _tokenizer(recipe: Recipe) -> PreTrainedTokenizerBase:
    """Cache the tokenizer: in a pool every chunk needs it, and it takes a second to load."""
    return recipe.tokenizer()
