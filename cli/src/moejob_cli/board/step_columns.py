"""The numbers of steps.jsonl as columns, read once.

A run of 100,000 steps has 62 MB of lines and 28 MB of numbers. Lines are parsed once; their columns go to a file of the
user's cache, and a request reads one column of it. Only lines that were added since are in memory, so a hundred runs
cost little. The run folder is never written to.
"""

from __future__ import annotations

import hashlib
import json
import os
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from math import nan
from pathlib import Path
from typing import Any

from pydantic_core import from_json

_CHUNK_BYTES = 4 * 1024 * 1024
# Lines in memory before they are added to the file.
_MOST_TAIL_ROWS = 20_000
# Numbers of a run; a line of a stranger may have any number of names.
MOST_COLUMNS = 512
_PROBE_BYTES = 4096
_VERSION = 1


@dataclass(frozen=True, slots=True)
class StoredColumns:
    """A file of columns: a header of one line, then the numbers of each column in turn."""

    path: Path
    rows: int
    # Bytes of steps.jsonl that are in the columns, and their digest.
    read_bytes: int
    probe: str
    names: tuple[str, ...]
    header_bytes: int

    def read_column(self, name: str) -> array[float]:
        """Return a column; NaN where a step lacks the number."""
        numbers = array("d")
        if name in self.names:
            with self.path.open("rb") as file:
                file.seek(self.header_bytes + self.names.index(name) * self.rows * numbers.itemsize)
                numbers.frombytes(file.read(self.rows * numbers.itemsize))
        return numbers if len(numbers) == self.rows else array("d", [nan]) * self.rows


@dataclass(slots=True)
class StepColumns:
    """The columns of one steps.jsonl."""

    path: Path
    cache: Path
    _stored: StoredColumns | None = field(init=False, default=None)
    _tail: dict[str, array[float]] = field(init=False, default_factory=dict)
    _tail_rows: int = field(init=False, default=0)
    _read_bytes: int = field(init=False, default=0)

    @property
    def rows(self) -> int:
        """Lines that were read."""
        return self._tail_rows + (0 if self._stored is None else self._stored.rows)

    @property
    def names(self) -> list[str]:
        """The names of all columns, in the order of the lines."""
        stored = () if self._stored is None else self._stored.names
        return list(dict.fromkeys((*stored, *self._tail)))

    def read_column(self, name: str) -> array[float]:
        """Return a column; NaN where a step lacks the number."""
        stored = array("d") if self._stored is None else self._stored.read_column(name)
        return stored + self._tail.get(name, array("d", [nan]) * self._tail_rows)

    def refresh(self) -> None:
        """Read the complete lines that were added."""
        if self._stored is None and not self._tail_rows:
            self._stored = read_stored_columns(self._cache_file, self.path)
            self._read_bytes = 0 if self._stored is None else self._stored.read_bytes
        try:
            with self.path.open("rb") as file:
                if os.fstat(file.fileno()).st_size < self._read_bytes:
                    self._forget_lines()
                file.seek(self._read_bytes)
                while chunk := _read_whole_lines(file):
                    self._add_lines(chunk.splitlines())
                    self._read_bytes += len(chunk)
        except FileNotFoundError:
            return
        if self._tail_rows > _MOST_TAIL_ROWS:
            self._store_columns()

    def _forget_lines(self) -> None:
        """Begin again: the file has become shorter, for a start has cut a half line or it is another file."""
        self._stored, self._tail, self._tail_rows, self._read_bytes = None, {}, 0, 0

    def _add_lines(self, lines: Sequence[bytes]) -> None:
        rows = list(parse_lines(lines))
        for name in dict.fromkeys(name for row in rows for name in row):
            if name not in self._tail:
                if len(self._tail) >= MOST_COLUMNS:
                    continue
                self._tail[name] = array("d", [nan]) * self._tail_rows
        for name, column in self._tail.items():
            column.extend([_as_number(row.get(name)) for row in rows])
        self._tail_rows += len(rows)

    @property
    def _cache_file(self) -> Path:
        digest = hashlib.sha256(str(self.path.resolve()).encode()).hexdigest()
        return self.cache / f"{digest[:32]}.columns"

    def _store_columns(self) -> None:
        """Move all columns to the file; they stay in memory where the cache cannot be written."""
        names = self.names
        header = {"version": _VERSION, "rows": self.rows, "bytes": self._read_bytes, "names": names}
        header["probe"] = _file_probe(self.path, self._read_bytes)
        unfinished = self._cache_file.with_suffix(f".{os.getpid()}")
        try:
            self.cache.mkdir(mode=0o700, parents=True, exist_ok=True)
            with unfinished.open("wb") as file:
                file.write(json.dumps(header).encode() + b"\n")
                for name in names:
                    file.write(self.read_column(name).tobytes())
            unfinished.replace(self._cache_file)
        except OSError:
            return
        self._stored = read_stored_columns(self._cache_file, self.path)
        if self._stored is not None:
            self._tail, self._tail_rows = {}, 0


def parse_lines(lines: Sequence[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the objects of lines; a damaged line is left out. One call parses all of them, mostly."""
    try:
        rows = from_json(b"[" + b",".join(lines) + b"]")
    except ValueError:
        rows = [_parse_line(line) for line in lines]
    yield from (row for row in rows if isinstance(row, dict))


def read_stored_columns(path: Path, steps: Path) -> StoredColumns | None:
    """Return the columns of a file; None where they belong to other lines than steps.jsonl has now."""
    try:
        with path.open("rb") as file:
            header = from_json(line := file.readline())
        stored = StoredColumns(
            path, header["rows"], header["bytes"], header["probe"], tuple(header["names"]), len(line)
        )
        is_same = header["version"] == _VERSION and _file_probe(steps, stored.read_bytes) == stored.probe
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return stored if is_same else None


def _read_whole_lines(file: Any) -> bytes:
    chunk: bytes = file.read(_CHUNK_BYTES)
    end = chunk.rfind(b"\n") + 1
    file.seek(end - len(chunk), os.SEEK_CUR)
    return chunk[:end]


def _file_probe(path: Path, read_bytes: int) -> str:
    """A digest of the beginning and of the end of what was read: a run folder may be made again under its name."""
    with path.open("rb") as file:
        begin = file.read(min(_PROBE_BYTES, read_bytes))
        file.seek(max(0, read_bytes - _PROBE_BYTES))
        end = file.read(min(_PROBE_BYTES, read_bytes))
    return hashlib.sha256(begin + b"\0" + end).hexdigest()


def _parse_line(line: bytes) -> Any:
    try:
        return from_json(line)
    except ValueError:
        return None


def _as_number(value: Any) -> float:
    # A number with thousands of digits has no float.
    if isinstance(value, float):
        return value
    return float(value) if isinstance(value, int) and abs(value) < 2**63 else nan
