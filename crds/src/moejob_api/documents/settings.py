"""Fields that are set beside a document: `spec.training.maxSteps=20` on a command line.

A path is written as refusals print it, a value as YAML would have it. Which fields there are, and what they take, is
for the reader of the whole job: it says of a field that is set what it would say of one in the file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import JsonValue

from moejob_api.documents.syntax import UnreadableError
from moejob_api.documents.tree import parse_documents
from moejob_api.problems import InvalidSpec, Problem, Rule

_EXAMPLE = "write a field and its value, as training.maxSteps=20 or data.train[0].source=chats.jsonl"
# A name, an index in brackets, or a name with other characters in brackets and quotes.
_STEP = re.compile(r'\.([A-Za-z_][\w-]*)|\[(\d{1,4})\]|\[("(?:[^"\\]|\\.)*")\]')
_FIELDS_OF_THE_ROOT = ("apiVersion", "kind", "metadata", "spec")

Steps = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class FieldSetting:
    """A field of a job, and the value that it gets; None removes the field."""

    text: str
    steps: Steps
    value: JsonValue


def parse_setting(text: str) -> FieldSetting:
    """Read FIELD=VALUE; a field of `spec` may be written without it."""
    path, equals, value = text.partition("=")
    if not equals:
        raise _setting_error(text, f"has no value; {_EXAMPLE}")
    steps = _parse_steps(path.strip())
    if not steps:
        raise _setting_error(text, f"{path!r} is no path of a field; {_EXAMPLE}")
    if steps[0] not in _FIELDS_OF_THE_ROOT:
        steps = ("spec", *steps)
    return FieldSetting(text, steps, _parse_value(text, value))


def with_settings(tree: dict[str, JsonValue], settings: Sequence[FieldSetting]) -> dict[str, JsonValue]:
    """Return a copy of the document with the fields set one after another."""
    document: dict[str, JsonValue] = json.loads(json.dumps(tree))
    for setting in settings:
        _set_field(document, setting)
    return document


def _parse_steps(path: str) -> Steps:
    steps: list[str | int] = []
    path, position = f".{path}", 0
    while position < len(path):
        match = _STEP.match(path, position)
        if match is None:
            return ()
        name, index, quoted = match.groups()
        steps.append(name or (int(index) if index else json.loads(quoted)))
        position = match.end()
    return tuple(steps)


def _parse_value(text: str, value: str) -> JsonValue:
    try:
        values = parse_documents(value)
    except UnreadableError as error:
        raise _setting_error(text, f"YAML cannot read the value: {error.reason}; put it in quotes") from None
    if len(values) > 1:
        raise _setting_error(text, "holds several documents; write one value")
    return values[0] if values else None


def _set_field(tree: dict[str, JsonValue], setting: FieldSetting) -> None:
    holder: JsonValue = tree
    for position, (step, following) in enumerate(zip(setting.steps, setting.steps[1:], strict=False)):
        inner = _get_value(holder, setting, position)
        if inner is None:
            inner = [] if isinstance(following, int) else {}
            _put_value(holder, step, inner)
        holder = inner
    _get_value(holder, setting, len(setting.steps) - 1)
    _put_value(holder, setting.steps[-1], setting.value)


def _get_value(holder: JsonValue, setting: FieldSetting, position: int) -> JsonValue:
    """Return the value at a step, None where there is none yet; refuse a step that its holder cannot have."""
    step, place = setting.steps[position], _dotted_path(setting.steps[:position])
    match holder, step:
        case dict(), str():
            return holder.get(step)
        case list(), int() if step < len(holder):
            return holder[step]
        case list(), int() if step == len(holder):
            return None
        case list(), int():
            raise _setting_error(setting.text, f"{place} has {len(holder)} of them; [{len(holder)}] adds one")
        case list(), _:
            raise _setting_error(setting.text, f"{place} is a list; name an item by its number, as {place}[0].{step}")
        case _:
            kind = "a mapping" if isinstance(holder, dict) else f"the value {json.dumps(holder)}"
            raise _setting_error(setting.text, f"{place} is {kind}, which has no {_dotted_path((step,))}")


def _put_value(holder: JsonValue, step: str | int, value: JsonValue) -> None:
    if isinstance(holder, dict):
        holder[str(step)] = value
    elif isinstance(holder, list) and isinstance(step, int):
        holder[step : step + 1] = [value]


def _dotted_path(steps: Steps) -> str:
    return "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in steps).removeprefix(".")


def _setting_error(text: str, message: str) -> InvalidSpec:
    return InvalidSpec((Problem(Rule.UNREADABLE, f"--set {text}", message),))
