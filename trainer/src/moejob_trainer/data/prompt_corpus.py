"""Prompts of one data set as lines of JSON, written once before the first step and then only mapped.

Only rank 0 reads prompts, but a million prompts as Python objects take gigabytes of its pod's memory, and tokenizing
them again would take minutes of every start.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from array import array
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter

from moejob_trainer.data.prepared_folder import REPORT, DamagedData, mark_damaged
from moejob_trainer.data.prompts import Prompt

_LINES, _PLACES = "prompts.jsonl", "places.npy"


@dataclass(frozen=True, slots=True)
class PromptLine:
    """A prompt as it is written, and the hash of its tokens and fields, which a run uses; its place is left out."""

    text: bytes
    digest: bytes


@dataclass(frozen=True, slots=True)
class PromptReport:
    """Counts of what happened to the records of a data set of prompts."""

    source: str
    split: str
    # Of all prompts in order, wherever they lay.
    fingerprint: str
    records: int
    prompts: int
    # Longer than the room that an answer leaves.
    dropped: int


_reports = TypeAdapter(PromptReport)


class PromptCorpus:
    """The prompts of one data set, each read when it is asked."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        try:
            self.report = _reports.validate_json((folder / REPORT).read_bytes())
            places: npt.NDArray[np.int64] = np.load(folder / _PLACES, allow_pickle=False).reshape(-1, 2)
            self._lines = np.memmap(folder / _LINES, np.uint8, "r")
        except (OSError, EOFError, ValueError) as error:
            raise DamagedData(f"{folder} does not hold prepared prompts, or not all of them: {error}") from error
        # Of each prompt.
        self._ends, self._checksums = places.T
        if len(self._ends) != self.report.prompts or len(self._lines) != self._ends[-1]:
            raise mark_damaged(self._folder)

    def __len__(self) -> int:
        """The number of prompts."""
        return len(self._ends)

    def read_prompt(self, number: int) -> Prompt:
        """One prompt, read from disk; DamagedData where it is not what was written."""
        start = self._ends[number - 1] if number else 0
        line = self._lines[start : self._ends[number]].tobytes()
        if zlib.crc32(line) != self._checksums[number]:
            raise mark_damaged(self._folder)
        content = json.loads(line)
        messages = content.get("messages")
        return Prompt(
            tuple(content["tokens"]),
            content["text"],
            content["fields"],
            content["place"],
            None if messages is None else tuple(messages),
        )


def encode_prompt_line(prompt: Prompt) -> PromptLine:
    """Return a prompt as it is written; values that JSON cannot hold become text."""
    visible_fields = {"tokens": prompt.tokens, "fields": prompt.fields}
    hidden_fields = {"text": prompt.text, "place": prompt.place, "messages": prompt.messages}
    text = json.dumps(visible_fields | hidden_fields, default=str)
    digest = hashlib.sha256(json.dumps(visible_fields, default=str, sort_keys=True).encode()).digest()
    return PromptLine(text.encode() + b"\n", digest)


def write_prompts(folder: Path, lines: Iterable[PromptLine]) -> tuple[int, str]:
    """Write prompts; returns how many, and their fingerprint. Not a corpus before it is finished."""
    # 16 bytes a prompt.
    places, digest, end = array("q"), hashlib.sha256(), 0
    with (folder / _LINES).open("wb") as file:
        for prompt_line in lines:
            file.write(prompt_line.text)
            digest.update(prompt_line.digest)
            end += len(prompt_line.text)
            places.extend((end, zlib.crc32(prompt_line.text)))
    rows = np.frombuffer(places, dtype=np.int64).reshape(-1, 2)
    np.save(folder / _PLACES, rows)
    return len(rows), digest.hexdigest()
