"""The words of `moejob explain` about a field, and the hint that leads from a refusal to it.

The reference is not published at an address, so a refusal names this command; the page `reference/fields.md` of the
site is made of the same fields.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from moejob_api.documents.peer_names import peer_fields, peer_names
from moejob_api.documents.wording import describe_unknown_field, expected_values
from moejob_api.job.fields import FieldKind, JobField, job_fields
from moejob_api.problems import InvalidSpec, Problem, Rule

_NAME_WIDTH = 24


def explain_field(name: str) -> str:
    """Return the text about a field by its path, or by the name that another trainer has for it; else InvalidSpec."""
    paths = _field_paths(name)
    return "\n".join(line for path in paths for line in _field_lines(path))


def explain_hint(problems: Sequence[Problem]) -> str | None:
    """Return the command that explains the field of the first problem; None when no problem is about a field."""
    for problem in problems:
        path = _known_part(problem.path)
        if path is not None:
            return f"`moejob explain {path}` says what it takes"
    return None


def _field_paths(name: str) -> tuple[str, ...]:
    path = name if name.partition(".")[0] in job_fields().fields else f"spec.{name}"
    known_path = _known_part(path)
    if known_path == path:
        return (path,)
    other_paths = peer_fields(name)
    if other_paths:
        return other_paths
    raise InvalidSpec((Problem(Rule.FIELD, path, describe_unknown_field(_unknown_place(path, known_path or "spec"))),))


def _unknown_place(path: str, known_path: str) -> tuple[str | int, ...]:
    """Return the place of the first name of a path that is no field, behind the part that is one."""
    field = _find_field(known_path)
    is_list = field is not None and field.element is not None
    unknown_name = next(_path_names(path.removeprefix(f"{known_path}.")))
    return (*_path_names(known_path), *((0,) if is_list else ()), unknown_name)


def _path_names(path: str) -> Iterator[str]:
    """Yield the names of a path without the places in lists."""
    for step in path.split("."):
        yield step.partition("[")[0]


def _find_field(path: str) -> JobField | None:
    field: JobField | None = job_fields()
    for step in _path_names(path):
        if field is not None and field.element is not None:
            field = field.element
        field = field.fields.get(step) if field is not None else None
    return field


def _known_part(path: str) -> str | None:
    """Return the longest beginning of a path that is a field of spec or status."""
    steps = path.split(".")
    if steps[0] not in ("spec", "status"):
        return None
    beginnings = (".".join(steps[:count]) for count in range(len(steps), 0, -1))
    return next((beginning for beginning in beginnings if _find_field(beginning) is not None), None)


def _field_lines(path: str) -> Iterator[str]:
    field = _find_field(path)
    if field is None:
        return
    yield path
    if field.description:
        yield f"  {field.description}"
    yield f"  takes    {expected_values(field)}"
    if field.kind is not FieldKind.OBJECT and field.default not in (None, ""):
        yield f"  default  {field.default}"
    others = peer_names().get(path)
    if others:
        yield f"  others   {', '.join(others)}"
    inner_fields = (field.element or field).fields
    for name, inner in inner_fields.items():
        yield f"  .{name:{_NAME_WIDTH}} {inner.description}"
