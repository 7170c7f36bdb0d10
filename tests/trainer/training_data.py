"""Builders for what the trainer reads: documents, plans, files of records and what becomes of them."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moejob_api.job.model import Data, DataFormat, Dataset, Model, OverlongSamples
from moejob_trainer.data.corpus import Corpus
from moejob_trainer.data.preparation import EncodingRecipe, prepare_datasets
from moejob_trainer.data.prompt_corpus import PromptCorpus
from moejob_trainer.data.prompt_preparation import prepare_prompts
from moejob_trainer.training import Document


def total_loss_weight(documents: Iterable[Document]) -> float:
    """Return the divisor of a global batch's summed loss; the same in every layout."""
    return math.fsum(document.loss_weight for document in documents)


def make_document(length: int, id: int = 0, weights: Sequence[float] | None = None, **extras: Any) -> Document:  # noqa: A002
    """A document whose tokens tell which document they are of and where they stand in it."""
    return Document(
        tokens=np.arange(length) + 1000 * (id + 1),
        weights=np.array([1.0] * length if weights is None else weights, dtype=np.float32),
        id=id,
        extras={name: np.asarray(value) for name, value in extras.items()},
    )


def make_documents(*lengths: int) -> list[Document]:
    """Documents of these lengths, numbered."""
    return [make_document(length, number) for number, length in enumerate(lengths)]


def user(content: str) -> dict[str, Any]:
    """Return a message of the user."""
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    """Return a message of the assistant."""
    return {"role": "assistant", "content": content}


def make_chat(*contents: str) -> dict[str, Any]:
    """A conversation in which user and assistant take turns."""
    return {"messages": [(assistant if n % 2 else user)(content) for n, content in enumerate(contents)]}


def write_jsonl(path: Path, *records: Mapping[str, Any] | str) -> Path:
    """A file of records, each JSON or, where it should be broken, the line itself."""
    lines = [record if isinstance(record, str) else json.dumps(record) for record in records]
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def make_source(source: Path | str, format: DataFormat = DataFormat.TEXT, weight: float = 1.0) -> Dataset:  # noqa: A002
    """A source of spec.data."""
    return Dataset(source=str(source), format=format, weight=weight)


def make_recipe(
    *sources: Dataset,
    max_length: int = 256,
    overlong: OverlongSamples = OverlongSamples.DROP,
    seed: int = 42,
    shuffle: bool = True,
    chat_template: str | None = None,
    claims: Path = Path("/claims"),
) -> EncodingRecipe:
    """A recipe for the tiny model."""
    data = Data(
        train=sources or (make_source("moejob/tiny-chats", DataFormat.CHAT),),
        max_length=max_length,
        overlong=overlong,
        seed=seed,
        shuffle=shuffle,
        chat_template=chat_template,
    )
    return EncodingRecipe(Model(source="moejob/tiny-moe"), data, vocabulary=512, claims=claims)


def prepare_corpora(folder: Path, using: EncodingRecipe) -> list[Corpus]:
    """The training data of a recipe, prepared below a folder."""
    return [Corpus(path) for path in prepare_datasets(using.data.train, using, folder)]


def prompt_corpora(folder: Path, using: EncodingRecipe, most_tokens: int = 64) -> list[PromptCorpus]:
    """The prompts of a recipe, prepared below a folder."""
    return [PromptCorpus(path) for path in prepare_prompts(using.data.train, using, most_tokens, folder)]
