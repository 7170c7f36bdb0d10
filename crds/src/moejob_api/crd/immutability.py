"""The immutable fields of a job, as rules that compare it with what it was.

A rule on an optional field is never asked when the field appears or goes: removing it and setting it again would get
past. So the rule about one sits on what holds it, and compares presence first. What is required or has a default is
always there, and compares itself.
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
_NEW_JOB = "create a new job"
_ADVICE = {"parallelism": f"{_NEW_JOB} whose checkpoint.resumeFrom names this one, with resume: Run, to go on in it"}


def immutability_rules(spec: Field) -> Iterator[tuple[str, JsonValue]]:
    """A rule and the object that it is on: for every section, and every field of a section that is so only in part."""
    for path in _immutable(spec):
        about = {"message": f"spec.{path} is immutable; {_ADVICE.get(path, _NEW_JOB)}", "reason": "FieldValueForbidden"}
        holder, _, name = f"spec.{path}".rpartition(".")
        if _is_optional(spec, path):
            compared = f"!has(self.{name}) || self.{name} == oldSelf.{name}"
            rule = f"has(self.{name}) == has(oldSelf.{name}) && ({compared})"
            yield holder, {"rule": rule, **about, "fieldPath": f".{name}"}
        else:
            yield f"spec.{path}", {"rule": "self == oldSelf", **about}


def immutable_sections(spec: Field) -> Iterator[str]:
    """The sections of which nothing can change."""
    return (name for name in _immutable(spec) if name in spec.fields and spec.fields[name].fields)


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
