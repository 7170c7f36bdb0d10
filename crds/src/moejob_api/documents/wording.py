"""Messages about refused fields: pydantic only says where, the words come from the field and its value."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import JsonValue, ValidationError

from moejob_api.documents.scalars import NotFiniteError, resolved
from moejob_api.job import GROUP, KIND, VERSION
from moejob_api.job.fields import Field, FieldKind, job_fields
from moejob_api.problems import Problem, Rule

MAX_PROBLEMS = 20
# Several errors may make one problem; beyond this no reader continues, and a flood would take seconds to word.
_MAX_WORDED = 100
_SHOWN_CHARACTERS = 40
_SHOWN_NAMES = 12
# Names longer than any field are not compared: difflib takes quadratic time.
_LONGEST_NAME = 64

Place = tuple[str | int, ...]

PATTERNS: Mapping[str, str] = {
    r"^[a-z]([-a-z0-9]*[a-z0-9])?$": 'lower-case letters, digits and "-", beginning with a letter, not ending with "-"',
    r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$": 'lower-case letters, digits, "-" and ".", with a letter or digit at both ends',
    r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$": "a name such as nvidia.com/gpu "
    'of letters, digits, "-", "_" and ".", with an optional domain and "/" in front',
    r"^/[^:]*$": 'a path that begins with "/" and holds no ":"',
    r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$": "a quantity such as 8, 500m or 16Gi",
    r"^[A-Za-z_][A-Za-z0-9_]*$": 'letters, digits and "_" that do not begin with a digit',
    r"^[0-9a-f]{40}$": "the 40 hexadecimal digits of a commit",
    r"^[A-Za-z0-9][-A-Za-z0-9_.:]*$": 'letters, digits, "-", "_", "." and ":", beginning with a letter or a digit',
    r"^[A-Za-z][-A-Za-z0-9]*$": 'letters, digits and "-", beginning with a letter',
    r"^[!-~]+$": "printable ASCII characters without a space",
}


def problems_of(error: ValidationError, tree: JsonValue) -> tuple[Problem, ...]:
    """One problem for every place that pydantic refused in a tree."""
    problems: dict[str, Problem] = {}
    # A misspelt field is one problem, not also a missing one.
    meant: set[str] = set()
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    for found in errors[:_MAX_WORDED]:
        place = _place(tree, found["loc"], is_missing=found["type"] == "missing")
        path = dotted(place)
        if path in problems:
            continue
        if found["type"] == "extra_forbidden":
            message, suggestion = _unknown(place)
            meant |= {suggestion} if suggestion else set()
        else:
            message = _message(found["type"], found["loc"], place, tree)
        problems[path] = Problem(Rule.FIELD, path, message)
    told = [problem for path, problem in problems.items() if path not in meant and not _holds(path, problems)]
    if len(told) <= MAX_PROBLEMS and len(errors) <= _MAX_WORDED:
        return tuple(told)
    return (*told[:MAX_PROBLEMS], Problem(Rule.FIELD, "", "there are more problems; fix these first"))


def _holds(path: str, problems: Mapping[str, Problem]) -> bool:
    """Return whether there is a problem inside: pydantic drops bad items of a list and then calls it too short."""
    return any(other.startswith((f"{path}.", f"{path}[")) for other in problems)


def wrong_kind(raw: Mapping[str, JsonValue]) -> Problem:
    """Return the reason that an object is no MoETrainingJob of this version."""
    version, kind, wanted = raw.get("apiVersion"), raw.get("kind"), f"{GROUP}/{VERSION}"
    if kind is None:
        return Problem(Rule.FIELD, "kind", f"is missing; write kind: {KIND}")
    if kind != KIND:
        if not isinstance(kind, str):
            return Problem(Rule.FIELD, "kind", f"must be {KIND}, not {_shown(kind)}")
        fix = f"write kind: {KIND}" if kind.lower() == KIND.lower() else "name the file of a job"
        return Problem(Rule.FIELD, "kind", f"this is a {_cut(kind)}, not a {KIND}; {fix}")
    if version is None:
        return Problem(Rule.FIELD, "apiVersion", f"is missing; write apiVersion: {wanted}")
    message = f"must be {wanted}, the only version that this release reads, not {_shown(version)}"
    return Problem(Rule.FIELD, "apiVersion", message)


def dotted(place: Place) -> str:
    """A place as a person writes it: spec.data.train[0].format."""
    path = ""
    for step in place:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step.isidentifier():
            path += f".{_cut(step)}" if path else _cut(step)
        else:
            path += f"[{json.dumps(_cut(step), ensure_ascii=False)}]"
    return path


def _place(tree: JsonValue, loc: Place, *, is_missing: bool) -> Place:
    """Return the path of an error in the tree: pydantic's own path continues into the alternatives it has tried."""
    place: list[str | int] = []
    value: Any = tree
    for step in loc:
        if _has(value, step):
            value = value[step]
        elif is_missing and isinstance(value, dict):
            value = None
        else:
            break
        place.append(step)
    return tuple(place)


def _has(value: Any, step: str | int) -> bool:
    if isinstance(value, list):
        return isinstance(step, int) and step < len(value)
    return isinstance(value, dict) and step in value


def _at(place: Place) -> Field | None:
    field: Field | None = job_fields()
    for step in place:
        if field is not None:
            field = field.fields.get(str(step), field.element)
    return field


def _message(kind: str, loc: Place, place: Place, tree: JsonValue) -> str:
    field = _at(place)
    if field is None:
        return "is not a field of a job; remove it"
    if kind == "missing":
        return f"is missing; it must be {expected(field)}"
    if loc[-1] == "[key]":
        parent = _at(place[:-1])
        return f"its name must have at most {parent.longest_key if parent else 0} characters, not {len(str(place[-1]))}"
    value: Any = tree
    for step in place:
        value = value[step]
    return f"must be {expected(field)}, not {_found(field, value)}{_fix(field, value)}"


# --- what a field takes ---------------------------------------------------------------------------------------------


def expected(field: Field) -> str:
    """Return the values that a field takes, to be put behind "must be"."""
    match field.kind:
        case FieldKind.OBJECT:
            needed = sorted(field.required)
            return (
                f"a mapping with {', '.join(needed)}"
                if needed
                else f"a mapping with fields such as {next(iter(field.fields))}"
            )
        case FieldKind.MAP:
            return f"a mapping{_count(field, 'of', ('entry', 'entries'))} of names to text"
        case FieldKind.LIST:
            return f"a list{_count(field, 'of', ('item', 'items'))}"
        case FieldKind.SWITCH:
            return "true or false"
        case FieldKind.WHOLE:
            return f"a whole number{_range(field)}"
        case FieldKind.NUMBER:
            return f"a number{_range(field)}"
        case FieldKind.TEXT | FieldKind.WHOLE_OR_TEXT:
            return _expected_text(field)


def _expected_text(field: Field) -> str:
    if field.choices:
        return f"one of {', '.join(field.choices)}" if len(field.choices) > 1 else field.choices[0]
    if field.pattern is not None:
        return PATTERNS.get(field.pattern, f"text like {field.pattern}") + _count(
            field, ",", ("character", "characters")
        )
    kind = "text" if field.kind is FieldKind.TEXT else "a whole number or text"
    return kind + _count(field, "of", ("character", "characters"))


def _range(field: Field) -> str:
    low, high = field.minimum, field.maximum
    if low is not None and high is not None and not field.above_minimum and not field.below_maximum:
        return f" from {low:.15g} to {high:.15g}"
    parts = []
    if low is not None:
        parts.append(f"above {low:.15g}" if field.above_minimum else f"of at least {low:.15g}")
    if high is not None:
        parts.append(f"below {high:.15g}" if field.below_maximum else f"at most {high:.15g}")
    return f" {' and '.join(parts)}" if parts else ""


def _count(field: Field, before: str, nouns: tuple[str, str]) -> str:
    low, high = field.shortest or 0, field.longest
    before = before if before == "," else f" {before}"
    if high is None:
        return f"{before} at least {low} {nouns[low != 1]}" if low else ""
    if low == high:
        return f"{before} {high} {nouns[high != 1]}"
    return f"{before} {low} to {high} {nouns[1]}" if low else f"{before} at most {high} {nouns[1]}"


# --- what it got instead --------------------------------------------------------------------------------------------


def _found(field: Field, value: JsonValue) -> str:
    if isinstance(value, str) and field.kind in (FieldKind.TEXT, FieldKind.WHOLE_OR_TEXT):
        is_too_long = field.longest is not None and len(value) > field.longest
        return f"{len(value)} characters" if is_too_long else json.dumps(_cut(value), ensure_ascii=False)
    return _shown(value)


def _shown(value: JsonValue) -> str:
    match value:
        case None:
            return "empty"
        case str():
            return f"the text {json.dumps(_cut(value), ensure_ascii=False)}"
        case list():
            return f"a list of {len(value)}"
        case dict():
            return "a mapping"
        case _:
            return json.dumps(value)


def _cut(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _fix(field: Field, value: JsonValue) -> str:
    match value:
        case str() if field.kind in (FieldKind.WHOLE, FieldKind.NUMBER, FieldKind.SWITCH):
            return _unquote(field, value)
        case str() if field.choices:
            near = _nearest(value, field.choices)
            return f"; did you mean {near}?" if near else ""
        case bool() if field.kind in (FieldKind.TEXT, FieldKind.WHOLE_OR_TEXT) and not field.choices:
            return "; put it in quotes: YAML reads yes, no, on, off, y and n as true or false"
        case float() | int() if field.kind is FieldKind.TEXT and not field.choices:
            return "; put it in quotes"
        case float() if field.kind is FieldKind.WHOLE_OR_TEXT:
            return "; put it in quotes"
        case _ if field.kind is FieldKind.LIST and not isinstance(value, list):
            return '; begin every item with "- "'
        case _:
            return ""


def _unquote(field: Field, value: str) -> str:
    try:
        meant = resolved(value)
    except NotFiniteError:
        return ""
    match field.kind:
        case FieldKind.SWITCH:
            fits = isinstance(meant, bool)
        case FieldKind.WHOLE:
            fits = isinstance(meant, int) and not isinstance(meant, bool)
        case _:
            fits = isinstance(meant, int | float) and not isinstance(meant, bool)
    return "; remove the quotes" if fits else ""


# --- unknown fields -------------------------------------------------------------------------------------------------


def _unknown(place: Place) -> tuple[str, str | None]:
    """Return the complaint about an unknown field, and the path of the field that was meant, when it is beside it."""
    parent, name = _at(place[:-1]), str(place[-1])
    said = f'unknown field "{_cut(name)}"'
    siblings = tuple(parent.fields) if parent is not None else ()
    near = _nearest(name, siblings, cutoff=0.8)
    elsewhere = list(_elsewhere(name))
    if near is None and elsewhere:
        return f"{said}; did you mean {' or '.join(elsewhere[:3])}?", None
    near = near or _nearest(name, siblings)
    if near is not None:
        return f'{said}; did you mean "{near}"?', dotted((*place[:-1], near))
    known = ", ".join(siblings[:_SHOWN_NAMES]) + (", ..." if len(siblings) > _SHOWN_NAMES else "")
    return f"{said}; the fields here are {known}" if known else f"{said}; remove it", None


def _elsewhere(name: str) -> Iterator[str]:
    for path, _ in job_fields().fields["spec"].walk("spec"):
        if path.endswith(f".{name}"):
            yield path


def _nearest(text: str, choices: tuple[str, ...], cutoff: float = 0.6) -> str | None:
    if len(text) > _LONGEST_NAME:
        return None
    folded = {_folded(choice): choice for choice in choices}
    close = difflib.get_close_matches(_folded(text), folded, n=1, cutoff=cutoff)
    return folded[close[0]] if close else None


def _folded(text: str) -> str:
    return text.replace("_", "").replace("-", "").casefold()
