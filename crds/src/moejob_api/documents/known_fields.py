"""The fields of an object that this version knows, as the API server prunes by a definition."""

from __future__ import annotations

from collections.abc import Mapping

from moejob_api.job.fields import FieldKind, JobField


def known_fields(value: object, field: JobField) -> object:
    """Return the value without fields that are not of this version; values of a wrong type stay as they are."""
    if field.kind is FieldKind.OBJECT and isinstance(value, Mapping):
        return {name: known_fields(inner, field.fields[name]) for name, inner in value.items() if name in field.fields}
    if field.kind is FieldKind.LIST and field.element is not None and isinstance(value, list):
        return [known_fields(item, field.element) for item in value]
    return value
