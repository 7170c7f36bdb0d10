"""A field as a structural schema of apiextensions.k8s.io/v1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import assert_never

from pydantic import JsonValue

from moejob_api.job.fields import FieldKind, JobField

Schema = dict[str, JsonValue]

# Lists whose items are identified by one of their fields, so that server-side apply can own them one by one.
# All other lists are taken as a whole.
LIST_KEYS: Mapping[str, str] = {
    "spec.resources.env": "name",
    "status.conditions": "type",
    "status.replicaStatuses": "role",
}


def schema_of(field: JobField, path: str) -> Schema:
    """The schema of a field, with all below it."""
    return {
        **({"description": field.description} if field.description else {}),
        **_type_schema(field),
        **_default_schema(field),
        **_bounds_schema(field),
        **_content_schema(field, path),
    }


def _type_schema(field: JobField) -> Schema:
    match field.kind:
        case FieldKind.OBJECT | FieldKind.MAP | FieldKind.FREE:
            is_free = field.kind is FieldKind.FREE
            return {"type": "object", **({"x-kubernetes-preserve-unknown-fields": True} if is_free else {})}
        case FieldKind.LIST:
            return {"type": "array"}
        case FieldKind.TEXT:
            return {"type": "string", **({"format": field.format} if field.format else {})}
        case FieldKind.WHOLE:
            return {"type": "integer", "format": "int64"}
        case FieldKind.NUMBER:
            return {"type": "number", "format": "double"}
        case FieldKind.SWITCH:
            return {"type": "boolean"}
        case FieldKind.WHOLE_OR_TEXT:
            # The one alternative that a structural schema allows.
            return {"anyOf": [{"type": "integer"}, {"type": "string"}], "x-kubernetes-int-or-string": True}
        case _:
            assert_never(field.kind)


def _default_schema(field: JobField) -> Schema:
    if field.default is None:
        return {}
    # Defaults inside an object apply once the object is there.
    return {"default": {} if field.kind is FieldKind.OBJECT else field.default}


def _bounds_schema(field: JobField) -> Schema:
    lengths = {FieldKind.LIST: "Items", FieldKind.MAP: "Properties"}.get(field.kind, "Length")
    bounds: Schema = {
        "enum": list(field.choices) or None,
        "pattern": field.pattern,
        f"min{lengths}": field.shortest,
        f"max{lengths}": field.longest,
        "minimum": field.minimum,
        "exclusiveMinimum": field.above_minimum or None,
        "maximum": field.maximum,
        "exclusiveMaximum": field.below_maximum or None,
    }
    return {key: value for key, value in bounds.items() if value is not None}


def _content_schema(field: JobField, path: str) -> Schema:
    match field.kind:
        case FieldKind.OBJECT:
            required: Schema = {"required": [*sorted(field.required)]} if field.required else {}
            return required | {
                "properties": {name: schema_of(inner, f"{path}.{name}") for name, inner in field.fields.items()}
            }
        case FieldKind.MAP if field.element is not None:
            return {"additionalProperties": _without_description(field.element, path)} | _key_lengths(field)
        case FieldKind.LIST if field.element is not None:
            return _list_type(path) | {"items": _without_description(field.element, path)}
        case _:
            return {}


def _without_description(element: JobField, path: str) -> Schema:
    # `kubectl explain` shows the list's description, never that of its items.
    return {key: value for key, value in schema_of(element, f"{path}[]").items() if key != "description"}


def _list_type(path: str) -> Schema:
    if path in LIST_KEYS:
        return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [LIST_KEYS[path]]}
    return {"x-kubernetes-list-type": "atomic"}


def _key_lengths(field: JobField) -> Schema:
    if field.longest_key is None:
        return {}
    # A structural schema has no word for keys.
    rule = f"self.all(key, size(key) <= {field.longest_key})"
    return {
        "x-kubernetes-validations": [{"rule": rule, "message": f"keys have at most {field.longest_key} characters"}]
    }
