"""Data that does not fit, into memory or on the disk: what reading and preparing it take does not grow with it."""

from __future__ import annotations

import gzip
import json
import os
import subprocess
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moejob_api.job.model import DataFormat, Dataset
from moejob_trainer.data import corpus, prompt_corpus
from moejob_trainer.data.corpus import Corpus, CorpusReport
from moejob_trainer.data.encoding import Sample
from moejob_trainer.data.prepared_folder import write_report
from moejob_trainer.data.prompt_corpus import PromptCorpus, PromptReport
from moejob_trainer.data.prompts import Prompt
from moejob_trainer.data.sources import read_records
from trainer.hub import serve_hub

MIB = 2**20
TEXT = "all work and no play " * 100


def peak(act: Callable[[], object]) -> int:
    """Return the most bytes that Python and Arrow held meanwhile beyond what they did before."""
    pool = pa.default_memory_pool()
    before, high = pool.bytes_allocated(), pool.max_memory() or 0
    tracemalloc.start()
    try:
        act()
        python = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # A mark that was higher before says nothing.
    arrow = max(0, (pool.max_memory() or 0) - before) if (pool.max_memory() or 0) > high else 0
    return python + arrow


def lines(count: int) -> Iterator[bytes]:
    for number in range(count):
        yield json.dumps({"text": f"{number} {TEXT}"}).encode() + b"\n"


def written(folder: Path, kind: str, count: int) -> Path:
    """A file of some 2 KiB a record."""
    path = folder / f"data{kind}"
    match kind:
        case ".jsonl":
            path.write_bytes(b"".join(lines(count)))
        case ".jsonl.gz":
            path.write_bytes(gzip.compress(b"".join(lines(count)), 1))
        case ".csv":
            path.write_text("text\n" + "".join(f"{number} {TEXT}\n" for number in range(count)))
        case _:
            table = pa.table({"text": [f"{number} {TEXT}" for number in range(count)]})
            pq.write_table(table, path, row_group_size=500, compression="none", use_dictionary=False)
    return path


@pytest.mark.parametrize("kind", [".jsonl", ".jsonl.gz", ".csv", ".parquet"])
def test_records_are_read_one_after_another(tmp_path: Path, kind: str) -> None:
    path = written(tmp_path, kind, 10_000)
    dataset = Dataset(source=str(path), format=DataFormat.TEXT)
    found = 0

    def count() -> None:
        nonlocal found
        found = sum(1 for _ in read_records(dataset))

    taken = peak(count)
    assert found == 10_000
    # Of 20 MiB of text. Parquet is read by 1,024 rows, which are rows of Arrow first and records then.
    assert taken < (12 * MIB if kind == ".parquet" else 2 * MIB)


READER = """
import json, sys
from moejob_api.job.model import Dataset
from moejob_trainer.data.prompt_corpus import PromptCorpus, PromptReport
from moejob_trainer.data.prompts import Prompt
from moejob_trainer.data.sources import read_records
from moejob_trainer.errors import BadData
for asked in json.load(sys.stdin):
    try:
        found = [record.fields["text"] for record in read_records(Dataset.model_validate_json(json.dumps(asked)))]
    except BadData as refused:
        found = str(refused)
    print(json.dumps(found))
"""


def test_a_streamed_set_of_the_hub_leaves_none_of_its_files_on_the_disk(tmp_path: Path) -> None:
    rows = [json.dumps({"text": f"row {number}"}).encode() for number in range(3_000)]
    whole = {"source": "org/rows", "format": "Text"}
    asked = [
        whole | {"streaming": True},
        whole | {"streaming": True, "maxExamples": 3},
        whole | {"source": "org/broken", "streaming": True},
        whole | {"source": "org/absent", "streaming": True},
    ]
    with serve_hub() as hub:
        hub.dataset("org/rows").push({"train.jsonl": b"\n".join(rows)})
        hub.dataset("org/broken").push({"train.jsonl": b"\n".join([*rows[:2], b'{"text": '])})
        environ = os.environ | hub.environ(tmp_path) | {"HF_DATASETS_OFFLINE": "0"}
        done = subprocess.run(
            [sys.executable, "-c", READER],
            input=json.dumps(asked),
            env=environ,
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    everything, first, broken, absent = map(json.loads, done.stdout.splitlines())
    assert everything == [f"row {number}" for number in range(3_000)]
    assert first == everything[:3]
    assert "org/broken[train] cannot be read after row" in broken
    assert "org/absent (split train) cannot be loaded" in absent
    kept = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert kept < sum(map(len, rows)) / 10


def test_prepared_documents_take_24_bytes_each_while_they_are_written(tmp_path: Path) -> None:
    count = 100_000
    one = Sample(np.arange(3, dtype=np.int32), np.ones(3, dtype=np.bool_))
    taken = peak(lambda: corpus.write_documents(tmp_path, (one for _ in range(count))))
    # An array grows by an eighth at a time, and moves when it does.
    assert taken < 24 * count * 2.5 + MIB


def test_prepared_documents_are_mapped_and_not_read(tmp_path: Path) -> None:
    tokens = 2_000
    one = Sample(np.arange(tokens, dtype=np.int32), np.ones(tokens, dtype=np.bool_))
    documents, total, trained = corpus.write_documents(tmp_path, (one for _ in range(5_000)))
    assert (documents, total, trained) == (5_000, 5_000 * tokens, 5_000 * tokens)
    write_report(tmp_path, CorpusReport("a", "train", "f", documents, documents, 0, 0, 0, total, trained))
    opened: list[Corpus] = []
    # 50 MB of tokens and marks; lengths, checksums and starts are 32 bytes a document.
    assert peak(lambda: opened.append(Corpus(tmp_path))) < MIB
    assert peak(lambda: opened[0].read_document(4_999)) < MIB
    assert (opened[0].read_document(4_999).tokens == one.tokens).all()


def test_prompts_are_mapped_and_not_held(tmp_path: Path) -> None:
    count = 5_000
    one = prompt_corpus.encode_prompt_line(Prompt(tuple(range(500)), TEXT, {"answer": TEXT}, "line 1"))
    written: list[tuple[int, str]] = []
    # 30 MB of lines, of which 16 bytes each are kept.
    assert peak(lambda: written.append(prompt_corpus.write_prompts(tmp_path, (one for _ in range(count))))) < MIB
    write_report(tmp_path, PromptReport("a", "train", written[0][1], count, count, 0))
    opened: list[PromptCorpus] = []
    assert peak(lambda: opened.append(PromptCorpus(tmp_path))) < MIB
    assert peak(lambda: opened[0].read_prompt(count - 1)) < MIB
    assert opened[0].read_prompt(count - 1).text == TEXT
