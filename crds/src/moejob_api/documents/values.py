"""Plain values as the API server takes them in: numbers narrowed, nothing that JSON cannot say."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import JsonValue

from moejob_api.documents.nodes import MAX_DEPTH
from moejob_api.documents.scalars import narrow_number
from moejob_api.problems import InvalidSpec, Problem, Rule


def plain_value(value: object, path: str = "", depth: int = 0) -> JsonValue:
    """A copy of a raw body in which only what JSON has is left; raises InvalidSpec for anything else."""
    if depth > MAX_DEPTH:
        raise _field_error(path, f"is nested more than {MAX_DEPTH} levels deep; a job needs no more than ten")
    match value:
        case None | bool():
            return value
        case str():
            return _checked_text(value, path)
        case int() | float():
            return _checked_number(value, path)
        case Mapping():
            return plain_fields(value, path, depth)
        case Sequence() if not isinstance(value, bytes | bytearray):
            return [plain_value(inner, f"{path}[{index}]", depth + 1) for index, inner in enumerate(value)]
        case _:
            raise _field_error(
                path, f"is a {type(value).__name__}, which is no JSON; use text, numbers, lists and mappings"
            )


def plain_fields(value: Mapping[Any, object], path: str = "", depth: int = 0) -> dict[str, JsonValue]:
    """The same of a mapping."""
    return {
        _checked_name(key, path): plain_value(inner, f"{path}.{key}" if path else str(key), depth + 1)
        for key, inner in value.items()
    }


def _checked_name(key: object, path: str) -> str:
    if not isinstance(key, str):
        raise _field_error(path, f"has the name {key!r}, which is no text; put it in quotes")
    return _checked_text(key, path)


def _checked_text(value: str, path: str) -> str:
    if not value.isascii() and any("\ud800" <= character <= "\udfff" for character in value):
        raise _field_error(path, "holds half of a character (a lone surrogate); write the whole character")
    return value


def _checked_number(value: float, path: str) -> int | float:
    try:
        number = narrow_number(float(value))
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise _field_error(path, "is not a number that Kubernetes can store; use a finite one")
    # A whole number that float rounds is kept as it is.
    return value if isinstance(value, int) and isinstance(number, int) else number


def has_null(value: JsonValue) -> bool:
    """Return whether there is a null at any depth."""
    match value:
        case dict():
            return any(inner is None or has_null(inner) for inner in value.values())
        case list():
            return any(has_null(inner) for inner in value)
        case _:
            return False


def _field_error(path: str, message: str) -> InvalidSpec:
    return InvalidSpec((Problem(Rule.FIELD, path, message),))
