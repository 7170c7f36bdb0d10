"""The fields of a job as plain values, read from the models: the CRD is made of them, refusals are worded with them.

If a model says more than a `Field` can hold, an error names the field: nothing is left out silently.
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

RawSchema = dict[str, Any]
NO_FIELDS: Mapping[str, JobField] = MappingProxyType({})


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
    # An object of any content, which other code than the API server's validates.
    FREE = auto()


@dataclass(frozen=True, slots=True)
class JobField:
    """One field with everything that bounds it; `shortest` and `longest` count characters, items or entries."""

    kind: FieldKind
    description: str = ""
    # None is "absent": no field of a job has null as a value of its own.
    default: JsonValue = None
    fields: Mapping[str, JobField] = attribute(default_factory=lambda: NO_FIELDS)
    required: frozenset[str] = frozenset()
    element: JobField | None = None
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

    def find_field(self, path: str) -> JobField | None:
        """The field at a dotted path below this one; None where there is none or a list is crossed."""
        field: JobField | None = self
        for name in path.split("."):
            field = field.fields.get(name) if field is not None else None
        return field

    def walk_fields(self, path: str = "") -> Iterator[tuple[str, JobField]]:
        """This field and all below it, each with its path; items and values are at `path[]`."""
        yield path, self
        for name, inner in self.fields.items():
            yield from inner.walk_fields(f"{path}.{name}" if path else name)
        if self.element is not None:
            yield from self.element.walk_fields(f"{path}[]")


class UnsupportedFieldError(TypeError):
    """The models say something that neither the CRD nor the wording of refusals knows about."""


@cache
def job_fields() -> JobField:
    """The whole job as a field."""
    return fields_of(MoETrainingJob)


def fields_of(model: type[BaseModel]) -> JobField:
    """A model as a field that holds its fields."""
    schema = model.model_json_schema(by_alias=True)
    return _SchemaReader(schema.get("$defs", {})).read_field(
        {k: v for k, v in schema.items() if k != "$defs"}, model.__name__
    )


_FREE = "x-kubernetes-preserve-unknown-fields"
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
    FieldKind.FREE: frozenset({_FREE, "additionalProperties"}),
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
class _SchemaReader:
    definitions: RawSchema

    def read_field(self, raw: RawSchema, path: str, inside: tuple[str, ...] = ()) -> JobField:
        raw, inside = self._inline_references(raw, path, inside)
        kind = _field_kind(raw, path)
        unknown = raw.keys() - _COMMON - _KEYS[kind]
        if unknown:
            raise UnsupportedFieldError(f"{path}: a {kind} field with {', '.join(sorted(unknown))} is not supported")
        field = JobField(
            kind=kind,
            description=raw.get("description", ""),
            default=without_nulls(raw.get("default")),
            fields={
                name: self.read_field(inner, f"{path}.{name}", inside)
                for name, inner in raw.get("properties", {}).items()
            },
            required=frozenset(raw.get("required", ())),
            element=self._read_element(raw, kind, path, inside),
            choices=tuple(raw.get("enum", (raw["const"],) if "const" in raw else ())),
            pattern=raw.get("pattern"),
            format=raw.get("format"),
            longest_key=_longest_key(raw, path),
            **_number_bounds(raw),
            **_length_bounds(raw),
        )
        _check_field(field, path)
        return field

    def _inline_references(
        self, raw: RawSchema, path: str, inside: tuple[str, ...]
    ) -> tuple[RawSchema, tuple[str, ...]]:
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
            raw = _single_alternative(raw, path)
        return raw, inside

    def _read_element(self, raw: RawSchema, kind: FieldKind, path: str, inside: tuple[str, ...]) -> JobField | None:
        if kind is FieldKind.LIST and "items" in raw:
            return self.read_field(raw["items"], f"{path}[]", inside)
        if kind is FieldKind.MAP:
            return self.read_field(raw["additionalProperties"], f"{path}[]", inside)
        return None


def _single_alternative(raw: RawSchema, path: str) -> RawSchema:
    around: RawSchema = {key: value for key, value in raw.items() if key != "anyOf"}
    members: list[RawSchema] = [member for member in raw["anyOf"] if member.get("type") != "null"]
    if len(members) == 1:
        return members[0] | around
    by_type: dict[Any, RawSchema] = {member.get("type"): member for member in members}
    if raw.get("x-kubernetes-int-or-string") and by_type.keys() == {"integer", "string"}:
        return by_type["string"] | by_type["integer"] | around | {"type": "integer or string"}
    raise UnsupportedFieldError(f"{path}: a choice between types is not supported; only whole number or text is")


def _field_kind(raw: RawSchema, path: str) -> FieldKind:
    if raw.get("x-kubernetes-int-or-string"):
        return FieldKind.WHOLE_OR_TEXT
    if raw.get(_FREE):
        return FieldKind.FREE
    if raw.get("type") == "object":
        if raw.get("additionalProperties") is True:
            raise UnsupportedFieldError(f"{path}: a mapping of anything is not supported; name its fields")
        return FieldKind.MAP if isinstance(raw.get("additionalProperties"), dict) else FieldKind.OBJECT
    if raw.get("type") not in _KIND_OF_TYPE:
        raise UnsupportedFieldError(f"{path}: type {raw.get('type', 'any')} is not supported")
    return _KIND_OF_TYPE[raw["type"]]


def _longest_key(raw: RawSchema, path: str) -> int | None:
    names = raw.get("propertyNames", {})
    unknown = names.keys() - {"maxLength", "type"}
    if unknown:
        raise UnsupportedFieldError(f"{path}: keys with {', '.join(sorted(unknown))} are not supported")
    longest: int | None = names.get("maxLength")
    return longest


def _number_bounds(raw: RawSchema) -> RawSchema:
    return {
        "minimum": raw.get("exclusiveMinimum", raw.get("minimum")),
        "maximum": raw.get("exclusiveMaximum", raw.get("maximum")),
        "above_minimum": "exclusiveMinimum" in raw,
        "below_maximum": "exclusiveMaximum" in raw,
    }


def _length_bounds(raw: RawSchema) -> RawSchema:
    lengths = {key[:3]: value for key, value in raw.items() if key in _LENGTHS}
    return {"shortest": lengths.get("min"), "longest": lengths.get("max")}


def _check_field(field: JobField, path: str) -> None:
    if field.kind is FieldKind.LIST and field.element is None:
        raise UnsupportedFieldError(f"{path}: a list must say what its items are")
    undescribed = [name for name, inner in field.fields.items() if not inner.description]
    if undescribed:
        raise UnsupportedFieldError(f"{path}: no description of {', '.join(undescribed)}")
    # A default of an object reaches the API server as {}, which then fills in the defaults inside.
    if field.kind is FieldKind.OBJECT and field.default is not None and field.default != inner_defaults(field):
        raise UnsupportedFieldError(f"{path}: its default differs from the defaults of its fields")


def inner_defaults(field: JobField) -> JsonValue:
    """Return the defaults of an object without any given field."""
    return {name: inner.default for name, inner in field.fields.items() if inner.default is not None}


def without_nulls(value: JsonValue) -> JsonValue:
    """A value without its empty fields, at every depth."""
    match value:
        case dict():
            return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
        case list():
            return [without_nulls(inner) for inner in value]
        case _:
            return value
