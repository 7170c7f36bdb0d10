"""Evidence that a test gives, read from its code: that it is there, on which weights it computes, and whether on a GPU.

Nothing is imported, for the tests of all environments are read in one. A mark that people set would rot when the test
changes; what a test reaches does not: it computes with real weights where it comes to the models of `make real-models`.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[1]
# What the models of `make real-models` are found by: a module of tests, and their folder in the cache.
_REAL_MODULE, _REAL_FOLDER = "real_models", "real-models"
# Tests of which nothing depends on the weights of a model, each with the reason.
WITHOUT_WEIGHTS: Mapping[str, str] = {
    "tests/api/": "jobs, layouts and estimates: no model is computed",
    "tests/builds/": "pages and images",
    "tests/chart/": "what Helm renders",
    "tests/cli/": "commands and what they print",
    "tests/client/": "a client, before stand-ins for an API server",
    "tests/operator/": "objects of Kubernetes",
    "tests/cluster/control_plane/": "objects of Kubernetes, on a real API server",
    "tests/cluster/nodes/test_lives.py": "what kubectl shows, and who gets the nodes",
    "tests/rollout/test_arguments.py": "arguments of an engine",
    "tests/rollout/test_nccl.py": "bytes of a bucket",
    "tests/trainer/checkpoints/test_any_history.py": "files and their manifests",
    "tests/trainer/checkpoints/test_store.py": "files and their manifests",
    "tests/trainer/data/": "text and tokens",
    "tests/trainer/training/test_learning_rate.py": "a schedule of numbers",
    "tests/trainer/launcher/": "processes of pods",
    "tests/trainer/megatron/test_rank_map.py": "groups of ranks",
    "tests/trainer/megatron_models/test_settings.py": "settings of layers, of which none computes",
    "tests/trainer/model/test_config_keys.py": "keys of configurations",
    "tests/trainer/rewards/": "text and scores",
    "tests/trainer/runtime/": "processes and their heartbeats",
    "tests/trainer/test_refusals.py": "jobs, of which none starts",
    "tests/trainer/tracking/": "numbers of steps that are sent",
}


class Weights(StrEnum):
    """Weights of the model that a test computes with."""

    REAL = "real"
    RANDOM = "random"
    NONE = "none"


@dataclass(frozen=True, slots=True)
class Evidence:
    """Evidence that one test gives."""

    weights: Weights
    needs_gpu: bool


class NoTestError(Exception):
    """An id that no test has which pytest collects."""


@cache
def read_evidence(test: str) -> Evidence:
    """Return the evidence of a test by its id, as tests/gpu/test_run.py::test_a_name."""
    path, _, name = test.partition("::")
    if not (ROOT / path).is_file() or not Path(path).name.startswith("test_"):
        raise NoTestError(f"{test}: there is no file {path} that pytest collects")
    definitions = _definitions(ROOT / path)
    if not name.startswith(("test_", "Test")) or name not in definitions:
        raise NoTestError(f"{test}: {path} has no test {name!r}")
    if any(_is_always_skipped(decorator) for decorator in getattr(definitions[name], "decorator_list", ())):
        raise NoTestError(f"{test} is always skipped")
    # Of its module alone: helpers ask for GPUs that do without.
    needs_gpu = {"is_available", "device_count"} & (_words(ROOT / path, name) | _words(ROOT / path, "pytestmark"))
    return Evidence(_weights(path, reached_words(test)), needs_gpu=bool(needs_gpu))


@cache
def reached_words(test: str) -> set[str]:
    """Return the names, modules and texts in a test, and in all that it leads to within the modules of tests."""
    path, _, name = test.partition("::")
    waiting = [(ROOT / path, name), (ROOT / path, "pytestmark")]
    words: set[str] = set()
    visited = set(waiting)
    while waiting:
        module, name = waiting.pop()
        for word in _words(module, name):
            words.add(word)
            places = [(module, word), *_imported(module, name, word)]
            waiting += [place for place in places if place not in visited]
            visited |= {*places}
    return words


def _weights(path: str, reached: set[str]) -> Weights:
    if reached & {_REAL_MODULE, _REAL_FOLDER}:
        return Weights.REAL
    return Weights.NONE if path.startswith(tuple(WITHOUT_WEIGHTS)) else Weights.RANDOM


@cache
def _definitions(module: Path) -> Mapping[str, ast.stmt]:
    """Return the statement that defines each name at the top of a module, and of each conftest.py that it has."""
    definitions: dict[str, ast.stmt] = {}
    folders = [folder for folder in module.parents if folder.is_relative_to(ROOT / "tests")]
    for file in (*(folder / "conftest.py" for folder in reversed(folders)), module):
        if file.is_file():
            for statement in _statements(file):
                definitions |= dict.fromkeys(_defined_names(statement), statement)
    return definitions


@cache
def _statements(file: Path) -> list[ast.stmt]:
    return ast.parse(file.read_text(encoding="utf-8")).body


def _defined_names(statement: ast.stmt) -> Iterator[str]:
    match statement:
        case ast.FunctionDef() | ast.ClassDef():
            yield statement.name
        case ast.Import() | ast.ImportFrom():
            yield from ((name.asname or name.name).partition(".")[0] for name in statement.names)
        case ast.Assign() | ast.AnnAssign():
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            yield from (node.id for target in targets for node in ast.walk(target) if isinstance(node, ast.Name))
        case _:
            pass


def _imported(module: Path, name: str, word: str) -> Iterator[tuple[Path, str]]:
    """Yield where a word is defined that a module of tests imports from another one."""
    statement = _definitions(module).get(name)
    if isinstance(statement, ast.ImportFrom) and statement.module:
        source = ROOT / "tests" / f"{statement.module.replace('.', '/')}.py"
        if source.is_file():
            yield source, word


@cache
def _words(module: Path, name: str) -> frozenset[str]:
    return frozenset(_words_of_statement(_definitions(module).get(name)))


def _words_of_statement(statement: ast.stmt | None) -> Iterator[str]:
    for node in ast.walk(statement) if statement else ():
        match node:
            case ast.Name(id=word) | ast.Attribute(attr=word) | ast.arg(arg=word) | ast.Constant(value=str(word)):
                yield word
            case ast.ImportFrom(module=str(source)):
                yield source
            case ast.alias(name=source):
                yield source
            case _:
                pass


def _is_always_skipped(decorator: ast.expr) -> bool:
    called = decorator.func if isinstance(decorator, ast.Call) else decorator
    return isinstance(called, ast.Attribute) and called.attr == "skip"
