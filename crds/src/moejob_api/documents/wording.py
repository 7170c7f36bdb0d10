"""Messages about refused fields: pydantic only says where, the words come from the field and its value."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import JsonValue, ValidationError

from moejob_api.documents.peer_names import derived_reason, peer_fields
from moejob_api.documents.scalars import NotFiniteError, resolve_scalar
from moejob_api.job import API_VERSIONS, KIND
from moejob_api.job.fields import FieldKind, JobField, job_fields
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
    meant_paths: set[str] = set()
    errors = error.errors(include_url=False, include_context=False, include_input=False)
    for detail in errors[:_MAX_WORDED]:
        place = _find_place(tree, detail["loc"], is_missing=detail["type"] == "missing")
        path = dotted_path(place)
        if path in problems:
            continue
        if detail["type"] == "extra_forbidden":
            message, suggestion = _unknown_field(place)
            meant_paths |= {suggestion} if suggestion else set()
        else:
            message = _refusal_message(detail["type"], detail["loc"], place, tree)
        problems[path] = Problem(Rule.FIELD, path, message)
    reported = [
        problem
        for path, problem in problems.items()
        if path not in meant_paths and not _has_inner_problem(path, problems)
    ]
    if len(reported) <= MAX_PROBLEMS and len(errors) <= _MAX_WORDED:
        return tuple(reported)
    return (*reported[:MAX_PROBLEMS], Problem(Rule.FIELD, "", "there are more problems; fix these first"))


def _has_inner_problem(path: str, problems: Mapping[str, Problem]) -> bool:
    """Return whether there is a problem inside: pydantic drops bad items of a list and then calls it too short."""
    return any(inner_path.startswith((f"{path}.", f"{path}[")) for inner_path in problems)


def wrong_kind(raw: Mapping[str, JsonValue]) -> Problem:
    """Return the reason that an object is no MoETrainingJob of this version."""
    version, kind, wanted = raw.get("apiVersion"), raw.get("kind"), " or ".join(API_VERSIONS)
    if kind is None:
        return Problem(Rule.FIELD, "kind", f"is missing; write kind: {KIND}")
    if kind != KIND:
        if not isinstance(kind, str):
            return Problem(Rule.FIELD, "kind", f"must be {KIND}, not {_shown_value(kind)}")
        fix = f"write kind: {KIND}" if kind.lower() == KIND.lower() else "name the file of a job"
        return Problem(Rule.FIELD, "kind", f"this is a {_shorten_text(kind)}, not a {KIND}; {fix}")
    if version is None:
        return Problem(Rule.FIELD, "apiVersion", f"is missing; write apiVersion: {API_VERSIONS[0]}")
    message = f"must be {wanted}, the versions that this release reads, not {_shown_value(version)}"
    return Problem(Rule.FIELD, "apiVersion", message)


def dotted_path(place: Place) -> str:
    """A place as a person writes it: spec.data.train[0].format."""
    path = ""
    for step in place:
        if isinstance(step, int):
            path += f"[{step}]"
        elif step.isidentifier():
            path += f".{_shorten_text(step)}" if path else _shorten_text(step)
        else:
            path += f"[{json.dumps(_shorten_text(step), ensure_ascii=False)}]"
    return path


def _find_place(tree: JsonValue, loc: Place, *, is_missing: bool) -> Place:
    """Return the path of an error in the tree: pydantic's own path continues into the alternatives it has tried."""
    place: list[str | int] = []
    value: Any = tree
    for step in loc:
        if _has_step(value, step):
            value = value[step]
        elif is_missing and isinstance(value, dict):
            value = None
        else:
            break
        place.append(step)
    return tuple(place)


def _has_step(value: Any, step: str | int) -> bool:
    if isinstance(value, list):
        return isinstance(step, int) and step < len(value)
    return isinstance(value, dict) and step in value


def _field_at(place: Place) -> JobField | None:
    field: JobField | None = job_fields()
    for step in place:
        if field is not None:
            field = field.fields.get(str(step), field.element)
    return field


def _refusal_message(kind: str, loc: Place, place: Place, tree: JsonValue) -> str:
    field = _field_at(place)
    if field is None:
        return "is not a field of a job; remove it"
    if kind == "missing":
        return f"is missing; it must be {expected_values(field)}"
    if loc[-1] == "[key]":
        parent = _field_at(place[:-1])
        return f"its name must have at most {parent.longest_key if parent else 0} characters, not {len(str(place[-1]))}"
    value: Any = tree
    for step in place:
        value = value[step]
    return f"must be {expected_values(field)}, not {_actual_text(field, value)}{_fix_hint(field, value)}"


# --- what a field takes ---------------------------------------------------------------------------------------------


def expected_values(field: JobField) -> str:
    """Return the values that a field takes, to be put behind "must be"."""
    match field.kind:
        case FieldKind.OBJECT:
            needed = sorted(field.required)
            return (
                f"a mapping with {', '.join(needed)}"
                if needed
                else f"a mapping with fields such as {next(iter(field.fields))}"
            )
        case FieldKind.MAP | FieldKind.FREE:
            return "a mapping with metadata or spec" if field.kind is FieldKind.FREE else _expected_map(field)
        case FieldKind.LIST:
            return f"a list{_count_text(field, 'of', ('item', 'items'))}"
        case FieldKind.SWITCH:
            return "true or false"
        case FieldKind.WHOLE:
            return f"a whole number{_range_text(field)}"
        case FieldKind.NUMBER:
            return f"a number{_range_text(field)}"
        case FieldKind.TEXT | FieldKind.WHOLE_OR_TEXT:
            return _expected_text(field)


def _expected_map(field: JobField) -> str:
    return f"a mapping{_count_text(field, 'of', ('entry', 'entries'))} of names to text"


def _expected_text(field: JobField) -> str:
    if field.choices:
        return f"one of {', '.join(field.choices)}" if len(field.choices) > 1 else field.choices[0]
    if field.pattern is not None:
        return PATTERNS.get(field.pattern, f"text like {field.pattern}") + _count_text(
            field, ",", ("character", "characters")
        )
    kind = "text" if field.kind is FieldKind.TEXT else "a whole number or text"
    return kind + _count_text(field, "of", ("character", "characters"))


def _range_text(field: JobField) -> str:
    low, high = field.minimum, field.maximum
    if low is not None and high is not None and not field.above_minimum and not field.below_maximum:
        return f" from {low:.15g} to {high:.15g}"
    parts = []
    if low is not None:
        parts.append(f"above {low:.15g}" if field.above_minimum else f"of at least {low:.15g}")
    if high is not None:
        parts.append(f"below {high:.15g}" if field.below_maximum else f"at most {high:.15g}")
    return f" {' and '.join(parts)}" if parts else ""


def _count_text(field: JobField, before: str, nouns: tuple[str, str]) -> str:
    low, high = field.shortest or 0, field.longest
    before = before if before == "," else f" {before}"
    if high is None:
        return f"{before} at least {low} {nouns[low != 1]}" if low else ""
    if low == high:
        return f"{before} {high} {nouns[high != 1]}"
    return f"{before} {low} to {high} {nouns[1]}" if low else f"{before} at most {high} {nouns[1]}"


# --- what it got instead --------------------------------------------------------------------------------------------


def _actual_text(field: JobField, value: JsonValue) -> str:
    if isinstance(value, str) and field.kind in (FieldKind.TEXT, FieldKind.WHOLE_OR_TEXT):
        is_too_long = field.longest is not None and len(value) > field.longest
        return f"{len(value)} characters" if is_too_long else json.dumps(_shorten_text(value), ensure_ascii=False)
    return _shown_value(value)


def _shown_value(value: JsonValue) -> str:
    match value:
        case None:
            return "empty"
        case str():
            return f"the text {json.dumps(_shorten_text(value), ensure_ascii=False)}"
        case list():
            return f"a list of {len(value)}"
        case dict():
            return "a mapping"
        case _:
            return json.dumps(value)


def _shorten_text(text: str) -> str:
    return text if len(text) <= _SHOWN_CHARACTERS else text[:_SHOWN_CHARACTERS] + "..."


def _fix_hint(field: JobField, value: JsonValue) -> str:
    match value:
        case str() if field.kind in (FieldKind.WHOLE, FieldKind.NUMBER, FieldKind.SWITCH):
            return _unquote_hint(field, value)
        case str() if field.choices:
            nearest_choice = _nearest_name(value, field.choices)
            return f"; did you mean {nearest_choice}?" if nearest_choice else ""
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


def _unquote_hint(field: JobField, value: str) -> str:
    try:
        parsed_value = resolve_scalar(value)
    except NotFiniteError:
        return ""
    match field.kind:
        case FieldKind.SWITCH:
            is_fitting = isinstance(parsed_value, bool)
        case FieldKind.WHOLE:
            is_fitting = isinstance(parsed_value, int) and not isinstance(parsed_value, bool)
        case _:
            is_fitting = isinstance(parsed_value, int | float) and not isinstance(parsed_value, bool)
    return "; remove the quotes" if is_fitting else ""


# --- unknown fields -------------------------------------------------------------------------------------------------


def describe_unknown_field(place: Place) -> str:
    """The complaint about an unknown field, with the field that was probably meant."""
    return _unknown_field(place)[0]


def _unknown_field(place: Place) -> tuple[str, str | None]:
    """Return the complaint about an unknown field, and the path of the field that was meant, when it is beside it."""
    parent, name = _field_at(place[:-1]), str(place[-1])
    complaint = f'unknown field "{_shorten_text(name)}"'
    siblings = tuple(parent.fields) if parent is not None else ()
    nearest_sibling = _nearest_name(name, siblings, cutoff=0.8)
    if nearest_sibling is None:
        meant_path, answer = _answer_peer_name(place)
        if answer is not None:
            return f"{complaint}; {answer}", meant_path
    other_paths = list(_same_named_fields(name))
    if nearest_sibling is None and other_paths:
        return f"{complaint}; did you mean {' or '.join(other_paths[:3])}?", None
    nearest_sibling = nearest_sibling or _nearest_name(name, siblings)
    if nearest_sibling is not None:
        return f'{complaint}; did you mean "{nearest_sibling}"?', dotted_path((*place[:-1], nearest_sibling))
    field_names = ", ".join(siblings[:_SHOWN_NAMES]) + (", ..." if len(siblings) > _SHOWN_NAMES else "")
    return f"{complaint}; the fields here are {field_names}" if field_names else f"{complaint}; remove it", None


def _answer_peer_name(place: Place) -> tuple[str | None, str | None]:
    """Return the path that another trainer's name means, when it is one path, and what to say about the name."""
    name = str(place[-1])
    paths, reason = peer_fields(name), derived_reason(name)
    if reason is not None:
        return None, f"remove it: {reason}"
    if not paths:
        return None, None
    meant_path = paths[0] if len(paths) == 1 else None
    return meant_path, f"it is {' or '.join(paths)} here"


def _same_named_fields(name: str) -> Iterator[str]:
    for path, _ in job_fields().fields["spec"].walk_fields("spec"):
        if path.endswith(f".{name}"):
            yield path


def _nearest_name(text: str, choices: tuple[str, ...], cutoff: float = 0.6) -> str | None:
    if len(text) > _LONGEST_NAME:
        return None
    folded_names = {_fold_name(choice): choice for choice in choices}
    close = difflib.get_close_matches(_fold_name(text), folded_names, n=1, cutoff=cutoff)
    return folded_names[close[0]] if close else None


def _fold_name(text: str) -> str:
    return text.replace("_", "").replace("-", "").casefold()
