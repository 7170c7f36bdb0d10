"""Records of every source, and the messages about files that cannot be read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from moejob_api.job.model import DataFormat, Dataset
from moejob_trainer.data.sources import count_records, read_records
from moejob_trainer.errors import BadData
from trainer.training_data import write_jsonl


def read(source: Path | str, claims: Path = Path("/claims"), split: str = "train") -> list[tuple[dict[str, Any], str]]:
    found = read_records(Dataset(source=str(source), split=split, format=DataFormat.TEXT), claims)
    return [(dict(record.fields), record.place) for record in found]


def parquet(path: Path, rows: list[dict[str, Any]]) -> Path:
    pq.write_table(pa.Table.from_pylist(rows), path)
    return path


def test_a_line_is_a_record_and_knows_its_line_past_empty_ones(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", {"text": "é"}, "", {"text": "b"})
    assert read(file) == [({"text": "é"}, f"{file}, line 1"), ({"text": "b"}, f"{file}, line 3")]


def test_a_last_line_without_an_end_counts(tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"text": "a"}\n{"text": "b"}')
    assert [fields["text"] for fields, _ in read(file)] == ["a", "b"]


def test_a_row_is_a_record_without_the_keys_that_only_other_rows_have(tmp_path: Path) -> None:
    file = parquet(
        tmp_path / "a.parquet", [{"messages": [{"role": "user", "content": "a"}]}, {"messages": [{"role": "tool"}]}]
    )
    assert read(file) == [
        ({"messages": [{"role": "user", "content": "a"}]}, f"{file}, row 1"),
        ({"messages": [{"role": "tool"}]}, f"{file}, row 2"),
    ]


def test_a_folder_is_its_files_in_order_of_their_names(tmp_path: Path) -> None:
    parquet(tmp_path / "b.parquet", [{"text": "2"}])
    write_jsonl(tmp_path / "a.jsonl", {"text": "1"})
    (tmp_path / "README.md").write_text("about")
    assert [fields["text"] for fields, _ in read(tmp_path)] == ["1", "2"]


def test_files_named_after_splits_are_never_mixed(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "train-00000-of-00001.jsonl", {"text": "train"})
    write_jsonl(tmp_path / "test-00000-of-00001.jsonl", {"text": "test"})
    assert [fields["text"] for fields, _ in read(tmp_path)] == ["train"]
    assert [fields["text"] for fields, _ in read(tmp_path, split="test")] == ["test"]


def test_a_claim_is_read_where_it_is_mounted(tmp_path: Path) -> None:
    (tmp_path / "sets").mkdir()
    file = write_jsonl(tmp_path / "sets" / "a.jsonl", {"text": "a"})
    assert read("pvc://sets/a.jsonl", claims=tmp_path) == [({"text": "a"}, f"{file}, line 1")]


def test_a_saved_data_set_is_read_by_its_split(tmp_path: Path) -> None:
    splits = {name: datasets.Dataset.from_list([{"text": name}]) for name in ("train", "test")}
    datasets.DatasetDict(splits).save_to_disk(tmp_path / "saved")
    assert read(tmp_path / "saved", split="test") == [({"text": "test"}, f"{tmp_path}/saved, row 1")]
    with pytest.raises(BadData, match="no split dev; it has test, train"):
        read(tmp_path / "saved", split="dev")


def test_a_hub_data_set_that_cannot_be_had_says_what_to_do() -> None:
    with pytest.raises(BadData, match=r"data set organization/name \(split train\) cannot be loaded: .*name its path"):
        read("organization/name")


BAD = [
    pytest.param('{"text": "a"', "line 2 is not JSON: .* at character 13; .*one whole JSON object", id="a broken line"),
    pytest.param('{"text": "a"} {"text": "b"}', "line 2 is not JSON: Extra data", id="two objects on a line"),
    pytest.param("[1]", "line 2 holds a JSON list", id="a list"),
    pytest.param('"a"', "line 2 holds a JSON str", id="text"),
    pytest.param("[" * 100_000, "line 2 is not JSON", id="too deep"),
]


@pytest.mark.parametrize(("line", "said"), BAD)
def test_a_line_that_is_no_record_is_named_with_its_file(tmp_path: Path, line: str, said: str) -> None:
    file = write_jsonl(tmp_path / "a.jsonl", {"text": "a"}, line)
    with pytest.raises(BadData, match=f"^{file}, {said}"):
        read(file)


def test_a_line_that_is_not_utf_8_is_named_with_its_file(tmp_path: Path) -> None:
    (file := tmp_path / "a.jsonl").write_bytes(b'{"text": "\xff"}\n')
    with pytest.raises(BadData, match=f"^{file}, line 1 is not UTF-8: .* at byte 10"):
        read(file)


def test_a_parquet_file_that_was_cut_off_is_named(tmp_path: Path) -> None:
    file = parquet(tmp_path / "a.parquet", [{"text": "a"}] * 100)
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(BadData, match=f"^{file} cannot be read as Parquet"):
        read(file)


@pytest.mark.parametrize(
    ("source", "split", "said"),
    [
        pytest.param("{folder}/none.jsonl", "train", "there is no file or folder {folder}/none.jsonl", id="no file"),
        pytest.param("none.jsonl", "train", "there is no file or folder none.jsonl", id="no file, relative"),
        pytest.param(
            "{folder}/data.txt", "train", "data.txt is none of .jsonl, .jsonl.gz, .csv", id="another kind of file"
        ),
        pytest.param("{folder}/empty", "train", "empty holds no file that ends in one of .jsonl", id="an empty folder"),
        pytest.param("{folder}/splits", "dev", "begins with split dev; there are test, train", id="no such split"),
        pytest.param("{folder}/loose", "train", "others are not .*more.jsonl", id="files of no split beside others"),
        pytest.param("moejob/tiny-chats", "dev", "no split dev; it has train and test", id="built in, no such split"),
        pytest.param("pvc://none/a.jsonl", "train", "claim none .* is not mounted", id="no such claim"),
        pytest.param("pvc:///a.jsonl", "train", "does not name a path inside a claim", id="no claim named"),
        pytest.param("pvc://../a.jsonl", "train", "does not name a path inside a claim", id="a claim above"),
        pytest.param(
            "pvc://sets/../../a", "train", "does not name a path inside a claim", id="a path out of the claim"
        ),
    ],
)
def test_a_source_that_is_not_there_is_named_with_what_to_do(
    tmp_path: Path, source: str, split: str, said: str
) -> None:
    (tmp_path / "data.txt").write_text("a")
    (tmp_path / "empty").mkdir()
    for folder, names in {"splits": ("train", "test"), "loose": ("train", "more"), "claims/sets": ()}.items():
        (tmp_path / folder).mkdir(parents=True)
        for name in names:
            write_jsonl(tmp_path / folder / f"{name}.jsonl", {"text": name})
    with pytest.raises(BadData, match=said.format(folder=tmp_path)):
        read(source.format(folder=tmp_path), tmp_path / "claims", split)


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        pytest.param(rb'{"text": "a\ud83d b"}', r"line 2 holds \\ud83d at character 2 of a text", id="value"),
        pytest.param(rb'{"text": "x", "a\uDE00": 1}', r"line 2 holds \\ude00", id="key"),
        pytest.param(rb'{"text": "x", "a": [{"b": ["\ud83d"]}]}', r"line 2 holds \\ud83d", id="deep"),
        pytest.param(
            rb'{"text": "x", "text": "y"}', "line 2 is not JSON: an object has the key 'text' twice", id="key twice"
        ),
        pytest.param(b'{"text": ' + b"9" * 5000 + b"}", "line 2 is not JSON", id="huge number"),
        pytest.param(b'{"text": ' + b"[" * 200_000, "line 2 is not JSON", id="deep nesting"),
        pytest.param(b'{"text": "a\0b"}', "line 2 is not JSON", id="NUL"),
        pytest.param(b'{"text": "a\xff"}', "line 2 is not UTF-8", id="not UTF-8"),
        pytest.param('{"text": "a"}'.encode("utf-16"), "line 2 is not", id="UTF-16"),
    ],
)
def test_a_line_of_odd_content_is_named_with_its_file(tmp_path: Path, line: bytes, reason: str) -> None:
    file = tmp_path / "odd.jsonl"
    file.write_bytes(b'{"text": "whole"}\r\n' + line + b"\n")
    with pytest.raises(BadData, match=f"{file}, {reason}"):
        [*read_records(Dataset(source=str(file), format=DataFormat.TEXT))]


def test_whole_pairs_escapes_and_a_byte_order_mark_are_read(tmp_path: Path) -> None:
    file = tmp_path / "odd.jsonl"
    file.write_bytes(b"\xef\xbb\xbf" + rb'{"text": "\ud83d\ude00 \\ud83d \u0000"}' + b"\r\n")
    (record,) = read_records(Dataset(source=str(file), format=DataFormat.TEXT))
    assert record.fields == {"text": "\U0001f600 \\ud83d \0"}


def test_records_are_counted_where_a_look_at_the_files_tells(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [{"text": str(number)} for number in range(5)]
    write_jsonl(tmp_path / "a.jsonl", *rows)
    parquet(tmp_path / "a.parquet", rows)
    (tmp_path / "a.csv").write_text("text\n1\n2\n")
    folder = tmp_path / "splits"
    folder.mkdir()
    write_jsonl(folder / "train.jsonl", *rows)
    parquet(folder / "test.parquet", rows[:2])

    def count(source: Path | str, **fields: Any) -> int | None:
        return count_records(Dataset(source=str(source), format=DataFormat.TEXT, **fields))

    assert count(tmp_path / "a.jsonl") == count(tmp_path / "a.parquet") == len(read(tmp_path / "a.jsonl")) == 5
    assert count(tmp_path / "a.jsonl", max_examples=3) == 3
    assert (count(folder), count(folder, split="test")) == (5, 2)
    # What a look does not tell: rows of CSV may span lines, and a choice is made when a record is read.
    assert count(tmp_path / "a.csv") is None
    assert count(tmp_path / "a.jsonl", where={"text": "1"}) is None
    assert count("moejob/tiny-chats") is count(tmp_path / "absent.jsonl") is None
