"""Readers of each field of a job, found by mypy: attribute access is resolved by types, not by names.

The modules of the job are given to mypy without their fields, so every read of one becomes an error that names class,
field and file. Fields that hold a model stay, or nothing would be known of what is inside them.
"""

from __future__ import annotations

import ast
import re
import typing
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from mypy.build import build
from mypy.modulefinder import BuildSource
from mypy.options import Options

from moejob_api.job import Spec
from moejob_api.job.base import ApiModel

ROOT = Path(__file__).parents[3]
_JOB = ROOT / "crds/src/moejob_api/job"
# `"Lora" has no attribute "rank"`, `Item "Lora" of "Lora | None" has no attribute "rank"`.
_ACCESS = re.compile(r'^(\S+?):\d+.*?"(?:[\w.]*\.)?(\w+)"(?: of "[^"]*")? has no attribute "(\w+)"')
_WHOLE = frozenset({"model_dump", "model_dump_json"})

Read = tuple[str, str]
Readers = Mapping[Read, set[str]]


def fields() -> Iterator[Read]:
    """Class and name of every field of a spec that holds a value and no model."""
    for model in _models(Spec, set()):
        for name, field in model.model_fields.items():
            if not _inside(field.annotation):
                yield model.__name__, name


def readers() -> Readers:
    """The files of each field's readers, relative to the repository; a model that is dumped is read whole."""
    stripped = frozenset(fields())
    found: defaultdict[Read, set[str]] = defaultdict(set)
    for error in build(list(_sources(stripped)), _options()).errors:
        access = _ACCESS.match(error)
        if access is None:
            continue
        file, model, name = access.groups()
        names = [field for owner, field in stripped if owner == model] if name in _WHOLE else [name]
        for each in names:
            found[model, each].add(str(Path(file).resolve().relative_to(ROOT)))
    return found


def _models(model: type[ApiModel], seen: set[type[ApiModel]]) -> set[type[ApiModel]]:
    if model not in seen:
        seen.add(model)
        for field in model.model_fields.values():
            for inner in _inside(field.annotation):
                _models(inner, seen)
    return seen


def _inside(annotation: object) -> list[type[ApiModel]]:
    if isinstance(annotation, type) and typing.get_origin(annotation) is None:
        return [annotation] if issubclass(annotation, ApiModel) else []
    return [model for part in typing.get_args(annotation) for model in _inside(part)]


def _sources(stripped: frozenset[Read]) -> Iterator[BuildSource]:
    for folder in ("crds/src", "operator/src", "client/src", "cli/src", "trainer/src", "rollout/src"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            module = ".".join(path.relative_to(ROOT / folder).with_suffix("").parts).removesuffix(".__init__")
            text = _without(path, stripped) if path.is_relative_to(_JOB) else None
            yield BuildSource(str(path), module, text)


def _without(path: Path, stripped: frozenset[Read]) -> str:
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            left = [part for part in node.body if (node.name, _target(part)) not in stripped]
            node.body = left or [ast.Pass()]
            # Pydantic's base is not looked into: an attribute of an unknown base would be no error.
            if node.name == ApiModel.__name__:
                node.bases, node.body = [], [ast.Pass()]
    return ast.unparse(tree)


def _target(part: ast.stmt) -> str:
    return part.target.id if isinstance(part, ast.AnnAssign) and isinstance(part.target, ast.Name) else ""


def _options() -> Options:
    options = Options()
    options.follow_imports = "skip"
    options.ignore_missing_imports = True
    options.check_untyped_defs = True
    options.incremental = False
    return options
