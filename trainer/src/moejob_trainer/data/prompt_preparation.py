"""Turns data sets of prompts into prompt corpora: reads, tokenizes on several cores, leaves out long prompts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from functools import cache, partial
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from moejob_api.job.model import Dataset
from moejob_trainer.data import prompt_corpus
from moejob_trainer.data.preparation import EncodingRecipe, countable_records, dataset_fingerprint, encode_records
from moejob_trainer.data.prepared_folder import ensure_prepared_folder, write_report
from moejob_trainer.data.prompt_corpus import PromptLine, PromptReport
from moejob_trainer.data.prompts import can_ask_prompt, read_prompt, refuse_no_prompts, refuse_unusable_prompts
from moejob_trainer.data.records import Record
from moejob_trainer.runtime.heartbeats import ShareCounter

# The format of the lines. A resumed run compares the hash of tokens and fields instead.
_VERSION = 1


def prepare_prompts(
    datasets: Sequence[Dataset], recipe: EncodingRecipe, most_tokens: int, folder: Path, workers: int = 1
) -> tuple[Path, ...]:
    """Write the prompts of data sets into folders below `folder`; return these in order. Existing ones are kept."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = recipe.load_tokenizer()
    folders = []
    for dataset in datasets:
        refuse_unusable_prompts(dataset, recipe, most_tokens)
        target = folder / dataset_fingerprint(dataset, recipe, tokenizer, folder, most_tokens, _VERSION)[:16]
        write = partial(_write_prompts, dataset=dataset, recipe=recipe, most_tokens=most_tokens, workers=workers)
        folders.append(ensure_prepared_folder(target, write, prompt_corpus.PromptCorpus))
    return tuple(folders)


def _write_prompts(building: Path, dataset: Dataset, recipe: EncodingRecipe, most_tokens: int, workers: int) -> None:
    counts = Counter[bool]()
    counter = ShareCounter(countable_records(dataset, recipe), recipe.report_share)

    def kept_lines() -> Iterator[PromptLine]:
        for prompt_line in encode_records(dataset, recipe, workers, partial(_encode_lines, most_tokens)):
            counts[prompt_line is not None] += 1
            counter.add(1)
            if prompt_line is not None:
                yield prompt_line

    prompt_count, prompts_hash = prompt_corpus.write_prompts(building, kept_lines())
    refuse_no_prompts(dataset, counts.total(), prompt_count, most_tokens)
    report = PromptReport(dataset.source, dataset.split, prompts_hash, counts.total(), prompt_count, counts[False])
    write_report(building, report)


def _encode_lines(most_tokens: int, recipe: EncodingRecipe, chunk: Sequence[Record]) -> list[PromptLine | None]:
    """Return each prompt as it is written; None where it is left out."""
    prompts = (read_prompt(record, _cached_tokenizer(recipe), recipe) for record in chunk)
    return [
        prompt_corpus.encode_prompt_line(prompt) if can_ask_prompt(prompt, most_tokens, recipe.data.overlong) else None
        for prompt in prompts
    ]


@cache
def _cached_tokenizer(recipe: EncodingRecipe) -> PreTrainedTokenizerBase:
    """Cache the tokenizer: in a pool every chunk needs it, and it takes a second to load."""
    return recipe.load_tokenizer()
