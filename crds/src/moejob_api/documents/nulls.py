"""Nulls as the API server drops them: those of fields that it knows and of map entries."""

from __future__ import annotations

from pydantic import JsonValue

from moejob_api.job.fields import Field, FieldKind, job_fields


def without_dropped_nulls(body: dict[str, JsonValue]) -> JsonValue:
    """A job's body without the nulls that the API server drops."""
    return _dropped(body, job_fields())


def _dropped(value: JsonValue, field: Field | None) -> JsonValue:
    if field is None:
        return value
    match value:
        case dict():
            kept = {name: inner for name, inner in value.items() if inner is not None or not _knows(field, name)}
            return {name: _dropped(inner, field.fields.get(name, field.element)) for name, inner in kept.items()}
        case list():
            return [_dropped(inner, field.element) for inner in value]
        case _:
            return value


def _knows(field: Field, name: str) -> bool:
    return name in field.fields or field.kind is FieldKind.MAP
