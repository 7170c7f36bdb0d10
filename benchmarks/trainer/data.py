"""Speed from data to batches: conversations tokenized on all cores, and global batches drawn, packed and assembled.

Runs in the trainer's environment: .venv/trainer/bin/python -m benchmarks.trainer.data
"""

from __future__ import annotations

import json
import os
import tempfile
import time
from itertools import islice
from pathlib import Path

from moejob_api.job.model import Data, DataFormat, Dataset, Model
from moejob_trainer.data import tiny
from moejob_trainer.data.blending import blended_dataset
from moejob_trainer.data.corpus import Corpus
from moejob_trainer.data.packing import BatchPlan
from moejob_trainer.data.prefetch import PrefetchIterator
from moejob_trainer.data.preparation import EncodingRecipe, prepare_datasets
from moejob_trainer.data.stream import BatchShare, BatchSize, TrainingData

CHATS = 20_000
MAX_LENGTH = 4096
# Of a run on 64 GPUs: what one of the ranks has to do for itself in every step.
SIZE = BatchSize(rows=256, row_tokens=MAX_LENGTH, packing=True)
SHARE = BatchShare(BatchPlan(data=64, tokens=MAX_LENGTH, multiple=8), rank=0)
STEPS = 20


def main() -> None:
    """Print tokens a second of each part."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder)
        source = Dataset(source=str(write_conversations(path / "chats.jsonl")), format=DataFormat.CHAT)
        recipe = EncodingRecipe(Model(source=tiny.TOKENIZER), Data(train=(source,), max_length=MAX_LENGTH))
        corpora = [tokenize_timed(recipe, path / str(workers), workers) for workers in sorted({1, os.cpu_count() or 1})]
        print(f"draw, pack, assemble:  {assembling(corpora[:1], recipe):12,.0f} tokens/s of the global batch")


def write_conversations(path: Path) -> Path:
    """Long conversations made of the tiny ones: of 30 to about 3,000 tokens."""
    pool = [fields["messages"] for fields in tiny.chat_records("train")]
    with path.open("w") as lines:
        for number in range(CHATS):
            turns = (pool[(number * 31 + turn) % len(pool)] for turn in range(1 + number * 7919 % 100 // 4))
            messages = [message for turn in turns for message in turn]  # type: ignore[attr-defined]
            lines.write(json.dumps({"messages": messages}) + "\n")
    return path


def tokenize_timed(recipe: EncodingRecipe, folder: Path, workers: int) -> Corpus:
    """The data, and a line about how fast it was made; the start of the processes counts."""
    started = time.perf_counter()
    [prepared] = prepare_datasets(recipe.data.train, recipe, folder, workers)
    corpus = Corpus(prepared)
    speed = corpus.report.tokens / (time.perf_counter() - started)
    print(f"tokenize, {workers} processes: {speed:12,.0f} tokens/s")
    return corpus


def assembling(corpora: list[Corpus], recipe: EncodingRecipe) -> float:
    """Tokens of global batches a second, as one rank gets them through a prefetching thread."""
    training = TrainingData(corpora, blended_dataset(corpora, recipe.data), SIZE)
    with PrefetchIterator(training.global_batches(SHARE)) as batches:
        next(batches)
        started = time.perf_counter()
        tokens = sum(batch.tokens for batch in islice(batches, STEPS))
        return tokens / (time.perf_counter() - started)


if __name__ == "__main__":
    main()
