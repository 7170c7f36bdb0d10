"""Every field of a job with values inside and outside its bounds, made from the fields: a new one is covered too."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from typing import Any

from builders import SFT
from moejob_api.job.fields import FieldKind, JobField, job_fields

SPEC = job_fields().fields["spec"]
# Between them they match and break every pattern.
TEXTS = ("a", "/a", "8", "1Gi", "a.b/c", "A_b", "", "-", "a b", "ä", "a:b", "a\n", "8GB", "1.5.2", ".", 40 * "f")
Step = str | int


def build_example(field: JobField) -> Any:
    """A value with everything in it that may be given."""
    match field.kind:
        case FieldKind.OBJECT:
            return {name: build_example(inner) for name, inner in field.fields.items()}
        case FieldKind.MAP:
            return {"key": "value"}
        case FieldKind.FREE:
            return {"metadata": {"annotations": {"example.com/key": "value"}}}
        case FieldKind.LIST:
            assert field.element is not None
            return [build_example(field.element)]
        case FieldKind.SWITCH:
            return True
        case FieldKind.WHOLE:
            return field.maximum
        case FieldKind.NUMBER:
            return field.maximum if not field.below_maximum else field.minimum
        case _:
            return field.choices[0] if field.choices else next(text for text in TEXTS if is_within_bounds(field, text))


def is_within_bounds(field: JobField, text: str) -> bool:
    """Return whether a text is within the bounds of a text field."""
    fits = (field.shortest or 0) <= len(text) <= (field.longest or math.inf)
    # Not $, which to Python also matches before a last line break.
    return fits and (field.pattern is None or re.search(field.pattern.replace("$", r"\Z"), text) is not None)


def field_values(field: JobField) -> Iterator[tuple[Any, bool]]:
    """Values for a field, and whether it takes them."""
    match field.kind:
        case FieldKind.OBJECT:
            yield from _object_values(field)
        case FieldKind.MAP:
            yield from _map_values(field)
        case FieldKind.LIST:
            yield from _list_values(field)
        case FieldKind.FREE:
            yield from ((build_example(field), True), ({}, True), ("text", False), ([], False), (1, False))
        case FieldKind.SWITCH:
            yield from ((False, True), ("true", False), (1, False), ([], False))
        case FieldKind.WHOLE | FieldKind.NUMBER:
            yield from _number_values(field)
        case _:
            yield from _text_values(field)


def _object_values(field: JobField) -> Iterator[tuple[Any, bool]]:
    whole = build_example(field)
    yield "text", False
    yield [whole], False
    yield {**whole, "bogus": 1}, False
    for name in field.fields:
        yield {key: value for key, value in whole.items() if key != name}, name not in field.required


def _map_values(field: JobField) -> Iterator[tuple[Any, bool]]:
    assert field.longest is not None
    assert field.longest_key is not None
    yield {}, True
    yield {"key": None}, True
    yield from (({"key": 1}, False), ({"key": True}, False), ({"key": []}, False), ({"key": {}}, False))
    yield [], False
    for count in (field.longest, field.longest + 1):
        yield {f"key{index}": "" for index in range(count)}, count == field.longest
    for length in (field.longest_key, field.longest_key + 1):
        yield {"k" * length: ""}, length == field.longest_key


def _list_values(field: JobField) -> Iterator[tuple[Any, bool]]:
    assert field.element is not None
    assert field.longest is not None
    item = build_example(field.element)
    yield item, False
    yield {"0": item}, False
    yield [None], False
    for count in {0, field.shortest or 0, field.longest, field.longest + 1}:
        yield _make_distinct(field.element, item, count), (field.shortest or 0) <= count <= field.longest


def _make_distinct(element: JobField, item: Any, count: int) -> list[Any]:
    """Items with names of their own, where these are free: a list of environment variables may not repeat one."""
    name = element.fields.get("name")
    if name is not None and not name.choices:
        return [{**item, "name": f"A{index}"} for index in range(count)]
    return [item] * count


def _number_values(field: JobField) -> Iterator[tuple[Any, bool]]:
    low, high = field.minimum, field.maximum
    assert low is not None
    assert high is not None
    step = 1 if field.kind is FieldKind.WHOLE else max(abs(high), 1) * 1e-9
    yield low, not field.above_minimum
    yield high, not field.below_maximum
    yield low - step, False
    yield high + step, False
    yield from (("1", False), (True, False), ([], False), ({}, False), (1e300, False))
    if field.kind is FieldKind.WHOLE:
        yield low + 0.5, False
        yield 10**30, False


def _text_values(field: JobField) -> Iterator[tuple[Any, bool]]:
    is_quantity = field.kind is FieldKind.WHOLE_OR_TEXT
    yield from (((1, is_quantity), (-1, False), (1.5, False), (True, False), ([], False), ({}, False)))
    if field.choices:
        yield from ((choice, True) for choice in field.choices)
        yield from ((text, False) for text in ("bogus", "", field.choices[0].swapcase()))
        return
    yield from ((text, is_within_bounds(field, text)) for text in TEXTS)
    good = next(text for text in TEXTS if text and is_within_bounds(field, text))
    if field.longest is not None and not is_quantity:
        yield good + "a" * (field.longest - len(good)), True
        yield good + "a" * (field.longest + 1 - len(good)), False


def field_places(field: JobField, place: tuple[Step, ...] = ()) -> Iterator[tuple[tuple[Step, ...], JobField]]:
    """Every field below the spec, and where it is in the example."""
    if place:
        yield place, field
    for name, inner in field.fields.items():
        yield from field_places(inner, (*place, name))
    if field.kind is FieldKind.LIST and field.element is not None:
        yield from field_places(field.element, (*place, 0))


def spec_with(place: tuple[Step, ...], value: Any) -> dict[str, Any]:
    """A small spec with one section in full, in which one value is replaced."""
    section = str(place[0])
    spec = {**SFT, section: build_example(SPEC.fields[section])}
    holder: Any = spec
    for step in place[:-1]:
        holder = holder[step]
    holder[place[-1]] = value
    return spec
