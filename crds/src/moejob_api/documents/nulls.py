"""Nulls as the API server drops them: nulls of known fields and of map entries."""

from __future__ import annotations

from pydantic import JsonValue

from moejob_api.job.fields import FieldKind, JobField, job_fields


def without_dropped_nulls(body: dict[str, JsonValue]) -> JsonValue:
    """A job's body without the nulls that the API server drops."""
    return _drop_nulls(body, job_fields())


def _drop_nulls(value: JsonValue, field: JobField | None) -> JsonValue:
    if field is None:
        return value
    match value:
        case dict():
            # Of {"seed": null, "sead": null} in spec.data the second stays, and is refused by its name.
            remaining = {
                name: inner for name, inner in value.items() if inner is not None or not _is_known_field(field, name)
            }
            return {
                name: _drop_nulls(inner, field.fields.get(name, field.element)) for name, inner in remaining.items()
            }
        case list():
            return [_drop_nulls(inner, field.element) for inner in value]
        case _:
            return value


def _is_known_field(field: JobField, name: str) -> bool:
    return name in field.fields or field.kind is FieldKind.MAP
