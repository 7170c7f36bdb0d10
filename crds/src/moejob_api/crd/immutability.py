"""What cannot change once a job exists, as rules on `spec` that compare it with what it was.

A rule on an optional field itself is never asked when the field appears or goes: removing it and setting it again
would get past. So every rule sits on `spec` and compares presence first.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import JsonValue

from moejob_api.fields import Field

MUTABLE = frozenset(
    {
        "lifecycle.suspend",
        "lifecycle.backoffLimit",
        "lifecycle.ttlSecondsAfterFinished",
        "lifecycle.activeDeadlineSeconds",
        "lifecycle.progressDeadlineSeconds",
    }
)


def immutability_rules(spec: Field) -> list[JsonValue]:
    """One rule for every section, and for every field of a section of which only a part is immutable."""
    return [
        {
            "rule": _unchanged(path, is_optional=_is_optional(spec, path)),
            "message": f"spec.{path} is immutable; create a new job",
            "reason": "FieldValueForbidden",
            "fieldPath": f".{path}",
        }
        for path in _immutable(spec)
    ]


def _immutable(spec: Field) -> Iterator[str]:
    for name, section in spec.fields.items():
        inner = [f"{name}.{field}" for field in section.fields]
        if MUTABLE.isdisjoint(inner):
            yield name
        else:
            yield from (path for path in inner if path not in MUTABLE)


def _is_optional(spec: Field, path: str) -> bool:
    parent, _, name = path.rpartition(".")
    holder = spec.at(parent) if parent else spec
    return holder is not None and name not in holder.required and holder.fields[name].default is None


def _unchanged(path: str, *, is_optional: bool) -> str:
    equal = f"self.{path} == oldSelf.{path}"
    if not is_optional:
        return equal
    return f"has(self.{path}) == has(oldSelf.{path}) && (!has(self.{path}) || {equal})"
