"""The fields of a job as plain values, read from the models: the CRD is made of them, refusals are worded with them.

Whatever the models say that a `Field` cannot hold is an error naming the field: nothing is left out silently.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from dataclasses import field as attribute
from enum import StrEnum, auto
from functools import cache
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel, JsonValue

from moejob_api.job import MoETrainingJob

Raw = dict[str, Any]
NO_FIELDS: Mapping[str, Field] = MappingProxyType({})


class FieldKind(StrEnum):
    """The kind of a field's value."""

    OBJECT = auto()
    MAP = auto()
    LIST = auto()
    TEXT = auto()
    WHOLE = auto()
    NUMBER = auto()
    SWITCH = auto()
    WHOLE_OR_TEXT = auto()


@dataclass(frozen=True, slots=True)
class Field:
    """One field with everything that bounds it; `shortest` and `longest` count characters, items or entries."""

    kind: FieldKind
    description: str = ""
    # None is "absent": no field of a job has null as a value of its own.
    default: JsonValue = None
    fields: Mapping[str, Field] = attribute(default_factory=lambda: NO_FIELDS)
    required: frozenset[str] = frozenset()
    element: Field | None = None
    choices: tuple[str, ...] = ()
    pattern: str | None = None
    format: str | None = None
    minimum: float | None = None
    maximum: float | None = None
    above_minimum: bool = False
    below_maximum: bool = False
    shortest: int | None = None
    longest: int | None = None
    longest_key: int | None = None

    def at(self, path: str) -> Field | None:
        """The field at a dotted path below this one; None where there is none or a list is crossed."""
        found: Field | None = self
        for name in path.split("."):
            found = found.fields.get(name) if found is not None else None
        return found

    def walk(self, path: str = "") -> Iterator[tuple[str, Field]]:
        """This field and all below it, each with its path; items and values are at `path[]`."""
        yield path, self
        for name, inner in self.fields.items():
            yield from inner.walk(f"{path}.{name}" if path else name)
        if self.element is not None:
            yield from self.element.walk(f"{path}[]")


class UnsupportedFieldError(TypeError):
    """The models say something that neither the CRD nor the wording of refusals knows about."""


@cache
def job_fields() -> Field:
    """The whole job as a field."""
    return fields_of(MoETrainingJob)


def fields_of(model: type[BaseModel]) -> Field:
    """A model as a field that holds its fields."""
    schema = model.model_json_schema(by_alias=True)
    return _Reader(schema.get("$defs", {})).field({k: v for k, v in schema.items() if k != "$defs"}, model.__name__)


_COMMON = frozenset({"title", "description", "default", "type"})
_LENGTHS = frozenset({"minItems", "maxItems", "minProperties", "maxProperties", "minLength", "maxLength"})
_BOUNDS = frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum"})
_KEYS = {
    FieldKind.OBJECT: frozenset({"properties", "required", "additionalProperties"}),
    FieldKind.MAP: frozenset({"additionalProperties", "propertyNames", "minProperties", "maxProperties"}),
    FieldKind.LIST: frozenset({"items", "minItems", "maxItems"}),
    FieldKind.TEXT: frozenset({"enum", "const", "pattern", "format", "minLength", "maxLength"}),
    FieldKind.WHOLE: _BOUNDS,
    FieldKind.NUMBER: _BOUNDS,
    FieldKind.SWITCH: frozenset(),
    FieldKind.WHOLE_OR_TEXT: frozenset({"x-kubernetes-int-or-string", "pattern", "minLength", "maxLength"}) | _BOUNDS,
}
_KIND_OF_TYPE = {
    "array": FieldKind.LIST,
    "string": FieldKind.TEXT,
    "integer": FieldKind.WHOLE,
    "number": FieldKind.NUMBER,
    "boolean": FieldKind.SWITCH,
}


@dataclass(frozen=True)
class _Reader:
    definitions: Raw

    def field(self, raw: Raw, path: str, inside: tuple[str, ...] = ()) -> Field:
        raw, inside = self._inlined(raw, path, inside)
        kind = _kind(raw, path)
        unknown = raw.keys() - _COMMON - _KEYS[kind]
        if unknown:
            raise UnsupportedFieldError(f"{path}: a {kind} field with {', '.join(sorted(unknown))} is not supported")
        found = Field(
            kind=kind,
            description=raw.get("description", ""),
            default=without_nulls(raw.get("default")),
            fields={
                name: self.field(inner, f"{path}.{name}", inside) for name, inner in raw.get("properties", {}).items()
            },
            required=frozenset(raw.get("required", ())),
            element=self._element(raw, kind, path, inside),
            choices=tuple(raw.get("enum", (raw["const"],) if "const" in raw else ())),
            pattern=raw.get("pattern"),
            format=raw.get("format"),
            longest_key=_longest_key(raw, path),
            **_bounds(raw),
            **_lengths(raw),
        )
        _check(found, path)
        return found

    def _inlined(self, raw: Raw, path: str, inside: tuple[str, ...]) -> tuple[Raw, tuple[str, ...]]:
        """References replaced by what they name, optional fields by what they hold when they are given."""
        while "$ref" in raw or "anyOf" in raw:
            if "$ref" in raw:
                name = raw["$ref"].removeprefix("#/$defs/")
                if name in inside:
                    raise UnsupportedFieldError(f"{path}: {name} contains itself, which a CRD cannot say")
                inside = (*inside, name)
                # What stands beside a reference is about this field, what is behind it about all fields of the type.
                raw = self.definitions[name] | {k: v for k, v in raw.items() if k != "$ref"}
                continue
            raw = _alternative(raw, path)
        return raw, inside

    def _element(self, raw: Raw, kind: FieldKind, path: str, inside: tuple[str, ...]) -> Field | None:
        if kind is FieldKind.LIST and "items" in raw:
            return self.field(raw["items"], f"{path}[]", inside)
        if kind is FieldKind.MAP:
            return self.field(raw["additionalProperties"], f"{path}[]", inside)
        return None


def _alternative(raw: Raw, path: str) -> Raw:
    around: Raw = {key: value for key, value in raw.items() if key != "anyOf"}
    members: list[Raw] = [member for member in raw["anyOf"] if member.get("type") != "null"]
    if len(members) == 1:
        return members[0] | around
    by_type: dict[Any, Raw] = {member.get("type"): member for member in members}
    if raw.get("x-kubernetes-int-or-string") and by_type.keys() == {"integer", "string"}:
        return by_type["string"] | by_type["integer"] | around | {"type": "integer or string"}
    raise UnsupportedFieldError(f"{path}: a choice between types is not supported; only whole number or text is")


def _kind(raw: Raw, path: str) -> FieldKind:
    if raw.get("x-kubernetes-int-or-string"):
        return FieldKind.WHOLE_OR_TEXT
    if raw.get("type") == "object":
        if raw.get("additionalProperties") is True:
            raise UnsupportedFieldError(f"{path}: a mapping of anything is not supported; name its fields")
        return FieldKind.MAP if isinstance(raw.get("additionalProperties"), dict) else FieldKind.OBJECT
    if raw.get("type") not in _KIND_OF_TYPE:
        raise UnsupportedFieldError(f"{path}: type {raw.get('type', 'any')} is not supported")
    return _KIND_OF_TYPE[raw["type"]]


def _longest_key(raw: Raw, path: str) -> int | None:
    names = raw.get("propertyNames", {})
    unknown = names.keys() - {"maxLength", "type"}
    if unknown:
        raise UnsupportedFieldError(f"{path}: keys with {', '.join(sorted(unknown))} are not supported")
    longest: int | None = names.get("maxLength")
    return longest


def _bounds(raw: Raw) -> Raw:
    return {
        "minimum": raw.get("exclusiveMinimum", raw.get("minimum")),
        "maximum": raw.get("exclusiveMaximum", raw.get("maximum")),
        "above_minimum": "exclusiveMinimum" in raw,
        "below_maximum": "exclusiveMaximum" in raw,
    }


def _lengths(raw: Raw) -> Raw:
    given = {key[:3]: value for key, value in raw.items() if key in _LENGTHS}
    return {"shortest": given.get("min"), "longest": given.get("max")}


def _check(found: Field, path: str) -> None:
    if found.kind is FieldKind.LIST and found.element is None:
        raise UnsupportedFieldError(f"{path}: a list must say what its items are")
    undescribed = [name for name, inner in found.fields.items() if not inner.description]
    if undescribed:
        raise UnsupportedFieldError(f"{path}: no description of {', '.join(undescribed)}")
    # A default of an object reaches the API server as {}, which then fills in the defaults inside.
    if found.kind is FieldKind.OBJECT and found.default is not None and found.default != inner_defaults(found):
        raise UnsupportedFieldError(f"{path}: its default differs from the defaults of its fields")


def inner_defaults(found: Field) -> JsonValue:
    """Return the defaults of an object, nothing of which is given."""
    return {name: inner.default for name, inner in found.fields.items() if inner.default is not None}


def without_nulls(value: JsonValue) -> JsonValue:
    """A value without its empty fields, at every depth."""
    match value:
        case dict():
            return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
        case list():
            return [without_nulls(inner) for inner in value]
        case _:
            return value
