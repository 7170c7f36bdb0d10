"""A record of a data set, wherever it lies."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from moejob_trainer.errors import BadData


@dataclass(frozen=True, slots=True)
class Record:
    """The fields of one line or row, and its place."""

    fields: Mapping[str, object]
    place: str


def refuse_surrogates(value: object, place: str) -> None:
    r"""Refuse a text, at any depth, that holds half of a surrogate pair: `"\ud83d"` without what follows it in JSON.

    It is no character: it has no UTF-8, and no tokenizer takes it.
    """
    # A stack instead of recursion: the file decides how deep a record is nested.
    waiting = [value]
    while waiting:
        last = waiting.pop()
        if isinstance(last, str):
            _refuse_surrogate(last, place)
        elif isinstance(last, Mapping):
            waiting += [*last.keys(), *last.values()]
        elif isinstance(last, list | tuple):
            waiting += last


def _refuse_surrogate(text: str, place: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadData(
            f"{place} holds \\u{ord(text[error.start]):04x} at character {error.start + 1} of a text: half of a "
            "surrogate pair, which is no character; remove it, or write it as U+FFFD"
        ) from error


def remove_absent_fields(fields: Mapping[str, object]) -> Mapping[str, object]:
    """Leave out keys without a value: Arrow gives every row the keys of all rows."""
    return {key: _remove_absent(value) for key, value in fields.items() if value is not None}


def _remove_absent(value: object) -> object:
    if isinstance(value, dict):
        return remove_absent_fields(value)
    if isinstance(value, list):
        return [_remove_absent(item) for item in value]
    return value
