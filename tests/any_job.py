"""Jobs that make little sense and pass the CRD's schema all the same: drawn from the fields, by a seed.

Most are a sound job with a few fields replaced, so that they get far; some are drawn whole.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from builders import GRPO, SFT, merge_sections
from fake_world import SMALL
from field_cases import SPEC, TEXTS, Step, field_places, is_within_bounds
from moejob_api.job import Spec
from moejob_api.job.fields import FieldKind, JobField, fields_of
from moejob_api.job.status import Status

STATUS = fields_of(Status)
# Nothing is wrong with these: what is then replaced in them is all that is odd.
SOUND = (merge_sections(SFT, SMALL), merge_sections(merge_sections(GRPO, SMALL), {"grpo": {"maxNewTokens": 128}}))
_ODD_TEXTS = (
    *TEXTS,
    "$(HOME)",
    "$$",
    "ÿ" * 40,
    "\u0000",
    "\ud7ff",
    "x" * 253,
    "a" * 63,
    "a.b.c",
    "9" * 32,
    "1e3",
    "pvc://a/b",
)
_TIMES = (
    "2030-01-01T00:00:00Z",
    "0001-01-01T00:00:00Z",
    "9999-12-31T23:59:59Z",
    "2030-01-01T00:00:00.123456789+14:00",
    "1970-01-01t00:00:00z",
)
# Patches of pods, of which some are refused.
TEMPLATES: tuple[dict[str, Any], ...] = (
    {},
    {"metadata": {"labels": {"example.com/team": "a"}}},
    {"spec": {"volumes": [{"name": "cache", "emptyDir": {}}], "hostNetwork": True}},
    {"spec": {"containers": [{"name": "beside", "image": "registry.example/beside:1"}]}},
    {"spec": {"hostPID": True}},
    {"specs": {}},
)
_WHOLES = (0, 1, 2, 3, 4, 7, 8, 16, 64, 1000)


class AnyJob:
    """Draws specs and statuses; the same seed draws the same ones."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._places = list(field_places(SPEC))
        self._leaves = [(place, field) for place, field in self._places if field.kind is not FieldKind.OBJECT]

    def spec(self) -> dict[str, Any]:
        """A spec within the bounds of every field."""
        if self._chance.random() < 0.1:
            drawn: dict[str, Any] = self._value(SPEC)
            return drawn
        base = self._chance.choice(SOUND)
        for _ in range(self._chance.choice((1, 1, 1, 2, 3, 8))):
            place, field = self._chance.choice(self._places)
            base = _replace_value(base, place, self._value(field))
        return base

    def nearly_sound_spec(self) -> dict[str, Any]:
        """A sound spec but for one or two single fields: most of these get past the CRD's rules too."""
        base = self._chance.choice(SOUND)
        whole = Spec.model_validate_json(json.dumps(base)).model_dump(mode="json", by_alias=True, exclude_none=True)
        inside = [(place, field) for place, field in self._leaves if _has_place(whole, place[:-1])]
        for _ in range(self._chance.choice((1, 2))):
            place, field = self._chance.choice(inside)
            whole = _replace_value(whole, place, self._value(field))
        return whole

    def status(self) -> dict[str, Any]:
        """A status within the bounds of every field, as a client with the right to write it may leave it."""
        drawn: dict[str, Any] = self._value(STATUS)
        return drawn

    def _value(self, field: JobField) -> Any:
        match field.kind:
            case FieldKind.OBJECT:
                return self._object(field)
            case FieldKind.MAP:
                assert field.element is not None
                keys = [
                    self._text(JobField(FieldKind.TEXT, longest=field.longest_key))
                    for _ in range(self._chance.randrange(3))
                ]
                return {key: self._value(field.element) for key in keys}
            case FieldKind.LIST:
                assert field.element is not None
                count = max(field.shortest or 0, min(field.longest or 3, self._chance.choice((0, 1, 1, 2, 3, 20))))
                return [self._value(field.element) for _ in range(count)]
            case FieldKind.FREE:
                return self._chance.choice(TEMPLATES)
            case FieldKind.SWITCH:
                return self._chance.random() < 0.5
            case FieldKind.WHOLE | FieldKind.NUMBER:
                return self._number(field)
            case FieldKind.WHOLE_OR_TEXT:
                return self._chance.choice((0, 1, "1Gi", "0", "1.5Ti", "9" * 20 + "E", "1m"))
            case _:
                return self._text(field)

    def _object(self, field: JobField) -> dict[str, Any]:
        share = self._chance.choice((0.1, 0.5, 0.9))
        given = (name for name in field.fields if name in field.required or self._chance.random() < share)
        return {name: self._value(field.fields[name]) for name in given}

    def _number(self, field: JobField) -> float:
        low = field.minimum if field.minimum is not None else -1e9
        high = field.maximum if field.maximum is not None else 2.0**53
        drawn = self._chance.choice((low, high, *_WHOLES, self._chance.uniform(low, high)))
        bounded = min(max(drawn, low), high)
        if field.kind is FieldKind.WHOLE:
            # JSON has one kind of numbers: 1.0 is whole.
            return float(int(bounded)) if self._chance.random() < 0.02 else int(bounded)
        is_outside = (field.above_minimum and bounded == low) or (field.below_maximum and bounded == high)
        return (low + high) / 2 if is_outside else bounded

    def _text(self, field: JobField) -> str:
        if field.choices:
            return self._chance.choice(field.choices)
        if field.format == "date-time":
            return self._chance.choice(_TIMES)
        fitting = [text for text in _ODD_TEXTS if is_within_bounds(field, text)]
        text = self._chance.choice(fitting)
        longest = field.longest or 300
        if field.pattern is None and self._chance.random() < 0.05:
            return "long " * (longest // 5)
        return text


def _has_place(tree: Any, place: tuple[Step, ...]) -> bool:
    """Return whether there is something at a place."""
    for step in place:
        if isinstance(step, int) or step not in tree:
            return False
        tree = tree[step]
    return True


def _replace_value(tree: Mapping[str, Any], place: tuple[Step, ...], value: Any) -> dict[str, Any]:
    """The tree with a value at a place, and whatever has to be there for it."""
    copied: dict[str, Any] = json.loads(json.dumps(tree))
    holder: Any = copied
    for step, below in pairwise(place):
        inner: Any = [] if isinstance(below, int) else {}
        if isinstance(holder, list):
            if not holder:
                holder.append(inner)
            holder = holder[0]
        else:
            holder = holder.setdefault(step, inner)
    last = place[-1]
    if isinstance(holder, list):
        holder[:1] = [value]
    elif isinstance(last, str):
        holder[last] = value
    return copied
