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

from moejob_api.job.model import Dataset
from moejob_trainer.data import tiny
from moejob_trainer.data.hub import HubPins, dataset_commit
from moejob_trainer.data.records import Record, refuse_surrogates, without_absent
from moejob_trainer.data.shapes import shaped
from moejob_trainer.data.tokenizers import CLAIMS, located
from moejob_trainer.errors import BadData

_BUILT_IN = {tiny.CHATS: tiny.chats, tiny.SUMS: tiny.sums, tiny.GUESSES: tiny.guesses}
_FILES = (".jsonl", ".jsonl.gz", ".csv", ".csv.gz", ".parquet")
_LONGEST_FIELD = 2**31 - 1
# What `save_to_disk` of the datasets library leaves in a folder.
_SAVED = ("dataset_info.json", "dataset_dict.json")
# Files of a folder belong to a split when they begin with its name, as on the hub: train-00000-of-00002.parquet.
_SPLIT = re.compile(
    r"(train|training|test|testing|validation|valid|val|dev|eval|evaluation)(?![a-z0-9])", re.IGNORECASE
)


def records(dataset: Dataset, claims: Path = CLAIMS, pins: HubPins | None = None) -> Iterator[Record]:
    """Yield the records of a data set that the job selects, in order, with the fields that its format reads."""
    found = _chosen(dataset, _read(dataset, claims, pins))
    return islice(found, dataset.max_examples) if dataset.max_examples is not None else found


def _chosen(dataset: Dataset, found: Iterator[Record]) -> Iterator[Record]:
    read = chosen = 0
    wanted = dataset.where or {}
    for record in found:
        read += 1
        if all(_written(record, column) == value for column, value in wanted.items()):
            chosen += 1
            named = _renamed(record, dataset.columns) if dataset.columns else record
            yield shaped(named, dataset.shape, dataset.format) if dataset.shape is not None else named
    if read and not chosen:
        values = ", ".join(f"{column} {value}" for column, value in wanted.items())
        raise BadData(f"none of the {read} records of {dataset.source} has {values}; change its where, or remove it")


def _written(record: Record, column: str) -> str:
    """Return a value as a job writes it: text as it is, anything else as JSON."""
    value = _column(record, column)
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)


def _renamed(record: Record, columns: Mapping[str, str]) -> Record:
    others = {name: value for name, value in record.fields.items() if name not in columns.values()}
    return replace(record, fields={**others, **{name: _column(record, column) for name, column in columns.items()}})


def _column(record: Record, column: str) -> object:
    # A row lacks the columns that have no value in it.
    return record.fields.get(column)


def _read(dataset: Dataset, claims: Path, pins: HubPins | None) -> Iterator[Record]:
    if dataset.source in _BUILT_IN:
        return _built_in(dataset)
    place = located(dataset.source, claims)
    path = Path(place)
    if path.is_file():
        return _of_file(path)
    if path.is_dir():
        return _of_folder(path, dataset.split)
    if place.startswith(("/", ".")) or path.name.endswith(_FILES):
        raise BadData(f"there is no file or folder {place}, which data source {dataset.source} names")
    from moejob_trainer.data.library import of_hub  # noqa: PLC0415  # slow to import

    return of_hub(dataset, None if pins is None else dataset_commit(dataset.source, pins))


def source_files(dataset: Dataset, claims: Path = CLAIMS) -> Mapping[str, Path]:
    """Return the files of a data set on disk by their names in it; none of the hub, whose data counts as unchanged."""
    path = Path(located(dataset.source, claims))
    if path.is_file():
        return {path.name: path}
    return {file.relative_to(path).as_posix(): file for file in sorted(path.rglob("*")) if file.is_file()}


def _built_in(dataset: Dataset) -> Iterator[Record]:
    if dataset.split not in tiny.splits():
        raise BadData(f"{dataset.source} has no split {dataset.split}; it has {' and '.join(tiny.splits())}")
    for number, fields in enumerate(_BUILT_IN[dataset.source](dataset.split), start=1):
        yield Record(fields, f"{dataset.source}[{dataset.split}], row {number}")


def _of_file(path: Path) -> Iterator[Record]:
    match PurePath(path.name.removesuffix(".gz")).suffix:
        case ".jsonl":
            return _lines(path)
        case ".csv":
            return _table(path)
        case ".parquet" if path.suffix == ".parquet":
            return _rows(path)
        case _:
            raise BadData(f"{path} is none of {', '.join(_FILES)}; convert it, one JSON object a line")


def _of_folder(folder: Path, split: str) -> Iterator[Record]:
    if any((folder / name).is_file() for name in _SAVED):
        from moejob_trainer.data.library import saved  # noqa: PLC0415  # slow to import

        return saved(folder, split)
    files = sorted(file for file in folder.rglob("*") if file.name.endswith(_FILES) and file.is_file())
    if not files:
        raise BadData(f"folder {folder} holds no file that ends in one of {', '.join(_FILES)}")
    return (record for file in _of_split(folder, files, split) for record in _of_file(file))


def _of_split(folder: Path, files: list[Path], split: str) -> list[Path]:
    """Choose the files of a split by name, lest test data be trained on; other files belong to any."""
    named = {file: match[1].lower() for file in files if (match := _SPLIT.match(file.name))}
    if not named:
        return files
    if len(named) < len(files):
        loose = next(file for file in files if file not in named)
        raise BadData(
            f"some files of {folder} are named after splits ({next(iter(named)).name}) and others are not "
            f"({loose.name}); name one file, or a folder for each split"
        )
    chosen = [file for file, name in named.items() if name == split.lower()]
    if not chosen:
        raise BadData(f"no file of {folder} begins with split {split}; there are {_listed(named.values())}")
    return chosen


def _lines(path: Path) -> Iterator[Record]:
    with _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _line(line, f"{path}, line {number}")


@contextmanager
def _opened(path: Path) -> Iterator[IO[bytes]]:
    """Open a file, unpacked where it is packed."""
    try:
        with cast("IO[bytes]", gzip.open(path)) if path.suffix == ".gz" else path.open("rb") as opened:
            yield opened
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise BadData(f"{path} cannot be unpacked: {error}; pack or copy it again") from error
    except PermissionError as error:
        raise BadData(f"{path} cannot be read: {error.strerror}; let the job's user read it") from error


def _table(path: Path) -> Iterator[Record]:
    csv.field_size_limit(_LONGEST_FIELD)
    with _opened(path) as opened, io.TextIOWrapper(opened, "utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, strict=True)
        try:
            for fields in rows:
                yield Record(_cells(fields, f"{path}, line {rows.line_num}"), f"{path}, line {rows.line_num}")
        except (csv.Error, UnicodeDecodeError) as error:
            raise BadData(f"{path} cannot be read as CSV after line {rows.line_num}: {error}") from error


def _cells(fields: Mapping[str, object], place: str) -> Mapping[str, object]:
    # The reader stores surplus cells under the key None, and missing cells as the value None.
    if None in fields or None in fields.values():
        raise BadData(f"{place} has another number of cells than the first line; quote cells that hold commas")
    return fields


def _line(line: bytes, place: str) -> Record:
    try:
        fields = json.loads(line.decode("utf-8-sig").rstrip(), object_pairs_hook=_unique)
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


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) < len(pairs):
        seen = Counter(key for key, _ in pairs)
        twice = next(key for key, count in seen.items() if count > 1)
        raise ValueError(f"an object has the key {twice[:100]!r} twice, and one of the values would be lost")
    return fields


def _rows(path: Path) -> Iterator[Record]:
    number = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for fields in batch.to_pylist():
                    number += 1
                    yield Record(without_absent(fields), f"{path}, row {number}")
    except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
        raise BadData(f"{path} cannot be read as Parquet after row {number}: {error}") from error


def _listed(names: object) -> str:
    return ", ".join(sorted(set(map(str, names)))) or "none"  # type: ignore[call-overload]
