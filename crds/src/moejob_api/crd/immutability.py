"""The immutable fields of a job, as rules that compare it with what it was.

A field without a default may be absent. Presence is compared first, so that removing such a field and setting it again
is refused too. Required fields and fields with a default are always there.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from moejob_api.job.fields import JobField

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


@dataclass(frozen=True, slots=True)
class ImmutableField:
    """A field that never changes; `cel` is true of `object` and `oldObject` that agree in it."""

    path: str
    cel: str
    message: str


def immutable_fields(spec: JobField) -> Iterator[ImmutableField]:
    """Every section, and every field of a section that may change in part."""
    for path in _immutable_paths(spec):
        new, old = f"object.spec.{path}", f"oldObject.spec.{path}"
        cel = f"{new} == {old}"
        if _is_optional(spec, path):
            # lifecycle.queue may be absent, and CEL fails on a field that is not there: has() stands in front.
            cel = f"has({new}) == has({old}) && (!has({new}) || {cel})"
        yield ImmutableField(f"spec.{path}", cel, f"spec.{path} is immutable; {_ADVICE.get(path, _NEW_JOB)}")


def immutable_sections(spec: JobField) -> Iterator[str]:
    """The sections without any field that can change."""
    return (name for name in _immutable_paths(spec) if name in spec.fields and spec.fields[name].fields)


def _immutable_paths(spec: JobField) -> Iterator[str]:
    for name, section in spec.fields.items():
        inner = [f"{name}.{field}" for field in section.fields]
        if MUTABLE.isdisjoint(inner):
            yield name
        else:
            yield from (path for path in inner if path not in MUTABLE)


def _is_optional(spec: JobField, path: str) -> bool:
    parent, _, name = path.rpartition(".")
    holder = spec.find_field(parent) if parent else spec
    return holder is not None and name not in holder.required and holder.fields[name].default is None
