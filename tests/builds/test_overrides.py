"""A method that overrides nothing and is never called was left behind when its base's method got another name."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from image_builds.recipes import ROOT

FOLDERS = (
    "crds/src",
    "operator/src",
    "trainer/src",
    "rollout/src",
    "client/src",
    "cli/src",
    "scripts",
    "tests",
    "benchmarks",
)
# hypothesis, pydantic and pytest call what is decorated, and Python itself calls dunder methods.
CALLED_BY_OTHERS = ("__", "test_")


def parse_tree(root: Path) -> dict[str, ast.Module]:
    """Return every module of ours by its path."""
    return {
        str(path.relative_to(root)): ast.parse(path.read_text(encoding="utf-8"))
        for folder in FOLDERS
        for path in sorted((root / folder).rglob("*.py"))
    }


def abandoned_methods(modules: dict[str, ast.Module]) -> list[str]:
    """Methods without decorator, of classes whose bases are all ours, that override nothing and are never named."""
    classes, named = _classes_by_name(modules), _read_names(modules)
    return [
        f"{path}: {found.name}.{method.name}"
        for path, module in modules.items()
        for found in _classes(module)
        for method in found.body
        if isinstance(method, ast.FunctionDef | ast.AsyncFunctionDef)
        and not method.decorator_list
        and not method.name.startswith(CALLED_BY_OTHERS)
        and method.name not in named
        and found.bases
        and (inherited := _inherited_names(found, classes)) is not None
        and method.name not in inherited
    ]


def _classes(module: ast.Module) -> Iterator[ast.ClassDef]:
    return (node for node in ast.walk(module) if isinstance(node, ast.ClassDef))


def _classes_by_name(modules: dict[str, ast.Module]) -> dict[str, list[ast.ClassDef]]:
    found = defaultdict(list)
    for module in modules.values():
        for each in _classes(module):
            found[each.name].append(each)
    return found


def _read_names(modules: dict[str, ast.Module]) -> set[str]:
    """Return the names of attributes, and strings, which may name one."""
    names: set[str] = set()
    for module in modules.values():
        for node in ast.walk(module):
            if isinstance(node, ast.Attribute):
                names.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.add(node.value)
    return names


def _inherited_names(found: ast.ClassDef, classes: dict[str, list[ast.ClassDef]]) -> set[str] | None:
    """Return what the bases of a class define; None where one of them is not ours."""
    names: set[str] = set()
    for base in map(_base_name, found.bases):
        if base not in classes:
            return None
        for each in classes[base]:
            further = _inherited_names(each, classes) if each is not found else set()
            if further is None:
                return None
            names |= further | _defined_names(each)
    return names


def _base_name(base: ast.expr) -> str:
    inner = base.value if isinstance(base, ast.Subscript) else base
    # A base that is reached by its module, as nn.Module, is of others.
    return inner.id if isinstance(inner, ast.Name) else ""


def _defined_names(found: ast.ClassDef) -> set[str]:
    return {node.name for node in found.body if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_every_method_of_a_subclass_overrides_one_or_is_called() -> None:
    assert abandoned_methods(parse_tree(ROOT)) == []


BASE = """
class Fake:
    def write_status(self): ...
    def run(self): self.write_status()
"""


@pytest.mark.parametrize(
    ("subclass", "expected"),
    [
        pytest.param("class Real(Fake):\n    def write_status(self): ...", [], id="an override"),
        pytest.param("class Real(Fake):\n    def put_status(self): ...", ["a.py: Real.put_status"], id="left behind"),
        pytest.param("class Real(Fake):\n    def look(self): ...\nReal().look()", [], id="a method of its own"),
        pytest.param("class Real(Fake, Other):\n    def put_status(self): ...", [], id="a base of others"),
        pytest.param("class Real(Fake):\n    @rule()\n    def put_status(self): ...", [], id="decorated"),
    ],
)
def test_a_method_that_a_new_name_of_its_base_left_behind_is_found(subclass: str, expected: list[str]) -> None:
    assert abandoned_methods({"a.py": ast.parse(BASE + subclass)}) == expected
