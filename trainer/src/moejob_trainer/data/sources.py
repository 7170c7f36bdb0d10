"""Records of a data set from any source, each with its place. Does not know the meaning of a record."""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from itertools import islice
from pathlib import Path, PurePath
from typing import IO, cast

import pyarrow as pa
import pyarrow.parquet as pq

from moejob_api.job.model import DATA_FILES, SAVED_DATASET, Dataset
from moejob_trainer.data import tiny
from moejob_trainer.data.hub import HubPins, pin_dataset_commit
from moejob_trainer.data.records import Record, refuse_surrogates, remove_absent_fields
from moejob_trainer.data.shapes import convert_shape
from moejob_trainer.data.tokenizers import CLAIMS, locate_source
from moejob_trainer.errors import BadData

_BUILT_IN = {tiny.CHATS: tiny.chat_records, tiny.SUMS: tiny.sum_records, tiny.GUESSES: tiny.guess_records}
_LONGEST_FIELD = 2**31 - 1
# Files of a folder belong to a split when they begin with its name, as on the hub: train-00000-of-00002.parquet.
_SPLIT = re.compile(
    r"(train|training|test|testing|validation|valid|val|dev|eval|evaluation)(?![a-z0-9])", re.IGNORECASE
)


def read_records(dataset: Dataset, claims: Path = CLAIMS, pins: HubPins | None = None) -> Iterator[Record]:
    """Yield the records of a data set that the job selects, in order, with the fields that its format reads."""
    selected = _select_records(dataset, _read_source(dataset, claims, pins))
    return islice(selected, dataset.max_examples) if dataset.max_examples is not None else selected


def _select_records(dataset: Dataset, all_records: Iterator[Record]) -> Iterator[Record]:
    read_count = chosen_count = 0
    wanted_values = dataset.where or {}
    for record in all_records:
        read_count += 1
        if all(_column_text(record, column) == value for column, value in wanted_values.items()):
            chosen_count += 1
            renamed = _rename_columns(record, dataset.columns) if dataset.columns else record
            yield convert_shape(renamed, dataset.shape, dataset.format) if dataset.shape is not None else renamed
    if read_count and not chosen_count:
        values = ", ".join(f"{column} {value}" for column, value in wanted_values.items())
        raise BadData(
            f"none of the {read_count} records of {dataset.source} has {values}; change its where, or remove it"
        )


def _column_text(record: Record, column: str) -> str:
    """Return a value as a job writes it: text as it is, anything else as JSON."""
    value = _column_value(record, column)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _rename_columns(record: Record, columns: Mapping[str, str]) -> Record:
    other_fields = {name: value for name, value in record.fields.items() if name not in columns.values()}
    return replace(
        record, fields={**other_fields, **{name: _column_value(record, column) for name, column in columns.items()}}
    )


def _column_value(record: Record, column: str) -> object:
    # A row lacks the columns that have no value in it.
    return record.fields.get(column)


def _read_source(dataset: Dataset, claims: Path, pins: HubPins | None) -> Iterator[Record]:
    if dataset.source in _BUILT_IN:
        return _read_built_in(dataset)
    location = locate_source(dataset.source, claims)
    path = Path(location)
    if path.is_file():
        return _read_file(path)
    if path.is_dir():
        return _read_folder(path, dataset.split)
    if location.startswith(("/", ".")) or path.name.endswith(DATA_FILES):
        raise BadData(f"there is no file or folder {location}, which data source {dataset.source} names")
    from moejob_trainer.data.library import read_hub_dataset  # noqa: PLC0415  # slow to import

    return read_hub_dataset(dataset, None if pins is None else pin_dataset_commit(dataset.source, pins))


def source_files(dataset: Dataset, claims: Path = CLAIMS) -> Mapping[str, Path]:
    """Return the files of a data set on disk by their names in it; none of the hub, whose data counts as unchanged."""
    path = Path(locate_source(dataset.source, claims))
    if path.is_file():
        return {path.name: path}
    return {file.relative_to(path).as_posix(): file for file in sorted(path.rglob("*")) if file.is_file()}


def count_records(dataset: Dataset, claims: Path = CLAIMS) -> int | None:
    """Return how many records a data set has, where a look at its files tells; None elsewhere."""
    path = Path(locate_source(dataset.source, claims))
    # Whether a record is chosen is known when it is read.
    if dataset.source in _BUILT_IN or dataset.where or not path.exists():
        return None
    counts = [_count_file(file) for file in _listed_files(path, dataset.split)]
    if not counts or None in counts:
        return None
    record_count = sum(count or 0 for count in counts)
    return record_count if dataset.max_examples is None else min(record_count, dataset.max_examples)


def _listed_files(path: Path, split: str) -> list[Path]:
    if path.is_file():
        return [path]
    if any((path / name).is_file() for name in SAVED_DATASET):
        return []
    files = sorted(file for file in path.rglob("*") if file.name.endswith(DATA_FILES) and file.is_file())
    return _select_split_files(path, files, split)


def _count_file(path: Path) -> int | None:
    """Return the rows of a Parquet file, or the lines of a JSONL file; None for what has to be unpacked or parsed."""
    if path.suffix == ".parquet":
        return int(pq.read_metadata(path).num_rows)
    if path.suffix != ".jsonl":
        return None
    with path.open("rb") as file:
        return sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))


def _read_built_in(dataset: Dataset) -> Iterator[Record]:
    if dataset.split not in tiny.split_names():
        raise BadData(f"{dataset.source} has no split {dataset.split}; it has {' and '.join(tiny.split_names())}")
    for number, fields in enumerate(_BUILT_IN[dataset.source](dataset.split), start=1):
        yield Record(fields, f"{dataset.source}[{dataset.split}], row {number}")


def _read_file(path: Path) -> Iterator[Record]:
    match PurePath(path.name.removesuffix(".gz")).suffix:
        case ".jsonl":
            return _read_json_lines(path)
        case ".csv":
            return _read_csv(path)
        case ".parquet" if path.suffix == ".parquet":
            return _read_parquet(path)
        case _:
            raise BadData(f"{path} is none of {', '.join(DATA_FILES)}; convert it, one JSON object a line")


def _read_folder(folder: Path, split: str) -> Iterator[Record]:
    if any((folder / name).is_file() for name in SAVED_DATASET):
        from moejob_trainer.data.library import read_saved_dataset  # noqa: PLC0415  # slow to import

        return read_saved_dataset(folder, split)
    files = sorted(file for file in folder.rglob("*") if file.name.endswith(DATA_FILES) and file.is_file())
    if not files:
        raise BadData(f"folder {folder} holds no file that ends in one of {', '.join(DATA_FILES)}")
    return (record for file in _select_split_files(folder, files, split) for record in _read_file(file))


def _select_split_files(folder: Path, files: list[Path], split: str) -> list[Path]:
    """Choose the files of a split by name, lest test data be trained on; other files belong to any."""
    split_names = {file: match[1].lower() for file in files if (match := _SPLIT.match(file.name))}
    if not split_names:
        return files
    if len(split_names) < len(files):
        loose = next(file for file in files if file not in split_names)
        raise BadData(
            f"some files of {folder} are named after splits ({next(iter(split_names)).name}) and others are not "
            f"({loose.name}); name one file, or a folder for each split"
        )
    split_files = [file for file, name in split_names.items() if name == split.lower()]
    if not split_files:
        raise BadData(f"no file of {folder} begins with split {split}; there are {_join_names(split_names.values())}")
    return split_files


def _read_json_lines(path: Path) -> Iterator[Record]:
    with _open_unpacked(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _parse_json_line(line, f"{path}, line {number}")


@contextmanager
def _open_unpacked(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, unpacked where it is packed."""
    try:
        with cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else path.open("rb") as content:
            yield content
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise BadData(f"{path} cannot be unpacked: {error}; pack or copy it again") from error
    except PermissionError as error:
        raise BadData(f"{path} cannot be read: {error.strerror}; let the job's user read it") from error


def _read_csv(path: Path) -> Iterator[Record]:
    csv.field_size_limit(_LONGEST_FIELD)
    with _open_unpacked(path) as content, io.TextIOWrapper(content, "utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, strict=True)
        try:
            for fields in rows:
                yield Record(_require_cells(fields, f"{path}, line {rows.line_num}"), f"{path}, line {rows.line_num}")
        except (csv.Error, UnicodeDecodeError) as error:
            raise BadData(f"{path} cannot be read as CSV after line {rows.line_num}: {error}") from error


def _require_cells(fields: Mapping[str, object], place: str) -> Mapping[str, object]:
    # The reader stores surplus cells under the key None, and missing cells as the value None.
    if None in fields or None in fields.values():
        raise BadData(f"{place} has another number of cells than the first line; quote cells that hold commas")
    return fields


def _parse_json_line(line: bytes, place: str) -> Record:
    try:
        fields = json.loads(line.decode("utf-8-sig").rstrip(), object_pairs_hook=_require_unique_keys)
    except UnicodeDecodeError as error:
        raise BadData(f"{place} is not UTF-8: {error.reason} at byte {error.start}") from error
    except json.JSONDecodeError as error:
        # The library counts lines within this line, which is always 1: only the character is useful.
        raise BadData(
            f"{place} is not JSON: {error.msg} at character {error.pos + 1}; every line must hold one whole JSON object"
        ) from error
    except (ValueError, RecursionError) as error:
        raise BadData(f"{place} is not JSON: {error}; every line must hold one whole JSON object") from error
    if not isinstance(fields, dict):
        raise BadData(f"{place} holds a JSON {type(fields).__name__}; every line must hold one JSON object")
    # UTF-8 has no other way to write one.
    if b"\\ud" in line or b"\\uD" in line:
        refuse_surrogates(fields, place)
    return Record(fields, place)


def _require_unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        key_counts = Counter(key for key, _ in pairs)
        twice = next(key for key, count in key_counts.items() if count > 1)
        raise ValueError(f"an object has the key {twice[:100]!r} twice, and one of the values would be lost")
    return fields


def _read_parquet(path: Path) -> Iterator[Record]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for fields in batch.to_pylist():
                    number += 1
                    yield Record(remove_absent_fields(fields), f"{path}, row {number}")
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise BadData(f"{path} cannot be read as Parquet after row {number}: {error}") from error


def _join_names(names: object) -> str:
    return ", ".join(sorted(set(map(str, names)))) or "none"  # type: ignore[call-overload]
