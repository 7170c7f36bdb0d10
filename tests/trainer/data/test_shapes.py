"""Data as people have it: named shapes, chosen records, renamed columns, packed files and tables."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import datasets
import pytest

from moejob_api.job.model import DataFormat, Dataset, DataShape
from moejob_trainer.data.sources import read_records
from moejob_trainer.errors import BadData
from trainer.training_data import write_jsonl

ALPACA = {"instruction": "Add.", "input": "2 and 3", "output": "5"}
GSM8K = {"question": "How many?", "answer": "1,000 + 5 = 1,005\n#### 1,005"}
SHARE_GPT = {
    "conversations": [
        {"from": "system", "value": "Be brief."},
        {"from": "human", "value": "2 + 3"},
        {"from": "gpt", "value": "5"},
    ]
}


def read(source: Path | str, format: str = "Text", **settings: Any) -> list[dict[str, Any]]:  # noqa: A002
    shape = settings.pop("shape", None)
    named = None if shape is None else DataShape(shape)
    dataset = Dataset(source=str(source), format=DataFormat(format), shape=named, **settings)
    return [dict(record.fields) for record in read_records(dataset)]


def make_message(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


@pytest.mark.parametrize(
    ("shape", "record", "wanted", "fields"),
    [
        (
            "Alpaca",
            ALPACA,
            "Chat",
            {"messages": [make_message("user", "Add.\n\n2 and 3"), make_message("assistant", "5")]},
        ),
        (
            "Alpaca",
            {**ALPACA, "input": "", "system": "Be brief."},
            "Chat",
            {
                "messages": [
                    make_message("system", "Be brief."),
                    make_message("user", "Add."),
                    make_message("assistant", "5"),
                ]
            },
        ),
        ("Alpaca", ALPACA, "PromptCompletion", {"prompt": "Add.\n\n2 and 3", "completion": "5"}),
        (
            "GSM8K",
            GSM8K,
            "Chat",
            {"messages": [make_message("user", "How many?"), make_message("assistant", GSM8K["answer"])]},
        ),
        (
            "GSM8K",
            GSM8K,
            "Prompts",
            {"prompt": [make_message("user", "How many?")], "answer": "1005", "solution": GSM8K["answer"]},
        ),
        (
            "ShareGPT",
            SHARE_GPT,
            "Chat",
            {
                "messages": [
                    make_message("system", "Be brief."),
                    make_message("user", "2 + 3"),
                    make_message("assistant", "5"),
                ]
            },
        ),
        (
            "ShareGPT",
            {
                "conversations": [
                    {"from": "system", "value": "a", "weight": None},
                    {"from": "gpt", "value": "b", "weight": 0},
                ]
            },
            "Chat",
            {"messages": [make_message("system", "a"), {**make_message("assistant", "b"), "weight": 0}]},
        ),
    ],
)
def test_a_shape_becomes_what_the_format_reads(
    shape: str,
    record: dict[str, Any],
    wanted: str,
    fields: dict[str, Any],
    tmp_path: Path,
) -> None:
    (found,) = read(write_jsonl(tmp_path / "a.jsonl", record), wanted, shape=shape)
    assert {name: found[name] for name in fields} == fields


@pytest.mark.parametrize(
    ("shape", "record", "message"),
    [
        ("Alpaca", {"instruction": "Add."}, "line 1: there is no output"),
        ("Alpaca", {**ALPACA, "input": 3}, "line 1: input is a int; expected text"),
        ("GSM8K", {"question": "a", "answer": "5"}, "line 1: the answer has no #### before its number"),
        ("ShareGPT", {"conversations": [{"from": "bot", "value": "a"}]}, "line 1, turn 1 is from 'bot'"),
        ("ShareGPT", {"conversations": "a"}, "line 1: conversations is no list"),
    ],
)
def test_what_has_another_shape_is_named(shape: str, record: dict[str, Any], message: str, tmp_path: Path) -> None:
    formats = {"GSM8K": "Prompts"}
    with pytest.raises(BadData, match=message):
        read(write_jsonl(tmp_path / "a.jsonl", record), formats.get(shape, "Chat"), shape=shape)


def test_records_are_chosen_by_their_columns_and_counted_behind_that(tmp_path: Path) -> None:
    rows = [{"text": str(number), "level": number % 2, "lang": "en"} for number in range(9)]
    file = write_jsonl(tmp_path / "a.jsonl", *rows)
    assert [row["text"] for row in read(file, where={"level": "1", "lang": "en"}, max_examples=3)] == ["1", "3", "5"]
    with pytest.raises(BadData, match=r"none of the 9 records of .* has lang de"):
        read(file, where={"lang": "de"})


def test_columns_get_the_names_that_the_format_reads(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", {"query": "Add.", "response": "5", "answer": "5"})
    named = {"prompt": "query", "completion": "response"}
    assert read(file, columns=named) == [{"prompt": "Add.", "completion": "5", "answer": "5"}]
    shaped = read(file, "PromptCompletion", columns={"instruction": "query", "output": "response"}, shape="Alpaca")
    assert shaped[0]["prompt"] == "Add."


def test_tables_and_packed_files_are_read(tmp_path: Path) -> None:
    table = '\ufeffprompt,completion\n"a, b","c\nd"\n'
    (tmp_path / "a.csv").write_text(table, encoding="utf-8")
    (tmp_path / "b.csv.gz").write_bytes(gzip.compress(table.encode()))
    (tmp_path / "c.jsonl.gz").write_bytes(gzip.compress(b'{"prompt": "a, b", "completion": "c\\nd"}\n'))
    row = {"prompt": "a, b", "completion": "c\nd"}
    assert read(tmp_path) == [row] * 3
    assert read(tmp_path / "b.csv.gz") == [row]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", b"prompt,completion\na\n", "line 2 has another number of cells"),
        ("a.csv", b"prompt,completion\na,b,c\n", "line 2 has another number of cells"),
        ("a.csv", b'prompt\n"a" b\n', "cannot be read as CSV after line"),
        ("a.jsonl.gz", gzip.compress(b'{"text": "a"}\n' * 99, mtime=0)[:-9], "cannot be unpacked"),
        ("a.jsonl.gz", b'{"text": "a"}\n', "cannot be unpacked"),
        ("a.parquet.gz", b"", "is none of .jsonl, .jsonl.gz, .csv, .csv.gz, .parquet"),
    ],
)
def test_a_broken_file_is_named_with_the_place(name: str, content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadData, match=message):
        read(tmp_path / name)


def test_a_configuration_of_a_data_set_on_the_hub_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def hub(*asked: str, split: str, revision: str | None, streaming: bool) -> datasets.Dataset:
        assert revision is None
        assert not streaming
        return datasets.Dataset.from_list([{"text": " ".join([*asked, split])}])

    monkeypatch.setattr(datasets, "load_dataset", hub)
    assert read("openai/gsm8k", configuration="main", split="test") == [{"text": "openai/gsm8k main test"}]
