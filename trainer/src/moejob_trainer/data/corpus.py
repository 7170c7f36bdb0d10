"""Documents of one data set as files of token ids, written once before the first step and then only mapped.

The run checks and counts all data before the first step, a rank reads only its own documents, and no step waits for the
tokenizer. A start does not hash the files, since it would have to read them: each document has its own checksum, and
every read of the document compares it.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from moejob_trainer.data.encoding import Sample
from moejob_trainer.data.prepared_folder import REPORT, DamagedData, mark_damaged
from moejob_trainer.training import Document

_TOKENS, _TRAINED, _SIZES = "tokens.bin", "trained.bin", "sizes.npy"


@dataclass(frozen=True, slots=True)
class CorpusReport:
    """Counts of what happened to the records of a data set."""

    source: str
    split: str
    fingerprint: str
    records: int
    documents: int
    # Records longer than maxLength: left out, cut, or left out because no trained token remained after the cut.
    dropped: int
    truncated: int
    emptied: int
    tokens: int
    trained_tokens: int


_reports = TypeAdapter(CorpusReport)


class Corpus:
    """The documents of one data set. Every rank opens it, perhaps on another machine than the writer's."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self.report = _reports.validate_json((folder / REPORT).read_bytes())
            sizes: npt.NDArray[np.int64] = np.load(folder / _SIZES, allow_pickle=False).reshape(-1, 3)
            self._tokens = np.memmap(folder / _TOKENS, np.int32, "r")
            self._trained = np.memmap(folder / _TRAINED, np.bool_, "r")
        except (OSError, EOFError, ValueError) as error:
            raise DamagedData(f"{folder} does not hold prepared data, or not all of it: {error}") from error
        # Numbers of each document.
        self.lengths, self.trained_tokens, self._checksums = sizes.T
        self._starts = np.concatenate([[0], np.cumsum(self.lengths)])
        tokens = {len(self._tokens), len(self._trained), int(self._starts[-1]), self.report.tokens}
        counts = len(self.lengths), int(self.trained_tokens.sum())
        if len(tokens) > 1 or counts != (self.report.documents, self.report.trained_tokens):
            raise mark_damaged(self._folder)

    def __len__(self) -> int:
        """The number of documents."""
        return len(self.lengths)

    def read_document(self, number: int, source: int = 0) -> Document:
        """One document, read from disk; DamagedData if its bytes differ from the written ones."""
        part = slice(self._starts[number], self._starts[number + 1])
        tokens, trained_mask = np.asarray(self._tokens[part]), np.asarray(self._trained[part])
        if _document_checksum(tokens, trained_mask) != self._checksums[number]:
            raise mark_damaged(self._folder)
        return Document(tokens=tokens, weights=trained_mask.astype(np.float32), id=number, source=source)


def write_documents(folder: Path, samples: Iterable[Sample]) -> tuple[int, int, int]:
    """Write documents; return the numbers of documents, tokens and trained tokens. The folder is no corpus yet."""
    # 24 bytes a document: data that does not fit into memory has many.
    sizes = array("q")
    with (folder / _TOKENS).open("wb") as tokens_file, (folder / _TRAINED).open("wb") as trained_file:
        for sample in samples:
            tokens_file.write(sample.tokens.tobytes())
            trained_file.write(sample.trained_mask.tobytes())
            checksum = _document_checksum(sample.tokens, sample.trained_mask)
            sizes.extend((len(sample.tokens), sample.trained_tokens, checksum))
    rows = np.frombuffer(sizes, dtype=np.int64).reshape(-1, 3)
    np.save(folder / _SIZES, rows)
    return len(rows), int(rows[:, 0].sum()), int(rows[:, 1].sum())


def _document_checksum(tokens: npt.NDArray[np.int32], trained_mask: npt.NDArray[np.bool_]) -> int:
    return zlib.crc32(trained_mask.tobytes(), zlib.crc32(tokens.tobytes()))
