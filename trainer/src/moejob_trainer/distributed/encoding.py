"""Messages between ranks as bytes: JSON that pydantic validates. Knows no torch.

The receiver names the type that it expects. Nothing is unpickled: a pickle runs code of its sender's choice.
"""

from __future__ import annotations

import json
from typing import Any, Final, TypeVar

import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

T = TypeVar("T")

Array = npt.NDArray[Any]

NOTHING: Final = TypeAdapter[None](None)
BOOLEAN: Final = TypeAdapter(bool)
INTEGER: Final = TypeAdapter(int)
TEXT: Final = TypeAdapter(str)


class BadMessage(ValueError):
    """A peer sent a message that no rank of moejob sends."""


def encode_message(value: T | None, kind: TypeAdapter[T]) -> bytes:
    """Return the value as JSON."""
    # pydantic's own dump_json writes NaN as null; a measurement may be NaN and must arrive as NaN.
    plain = kind.dump_python(value, mode="json", by_alias=True, warnings="none")  # type: ignore[arg-type]
    return json.dumps(plain, separators=(",", ":")).encode()


def decode_message(content: bytes, kind: TypeAdapter[T]) -> T:
    """Return the value of a JSON message; BadMessage where it is of another type."""
    try:
        return kind.validate_json(content)
    except ValidationError as error:
        raise BadMessage(f"a rank sent what this one does not expect: {error}") from error
