"""`make lock`, the import contracts and the page of the architecture name only what exists, and leave nothing out."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from image_builds.recipes import ROOT

SOURCES = {
    "api": "crds",
    "operator": "operator",
    "trainer": "trainer",
    "rollout": "rollout",
    "client": "client",
    "cli": "cli",
}
# What a process starts with.
APART = {"moejob_operator.handlers", "moejob_operator.installed"}
MODULES = sorted(set(re.findall(r"moejob_(\w+?)((?:\.\w+)*)(?=\s|$)", (ROOT / ".importlinter").read_text())))
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
CLOSURES = re.findall(r"call lock,([a-z-]+),\$\(\w+\),([a-z -]+)", (ROOT / "Makefile").read_text())


def test_make_lock_makes_every_closure_of_inputs_that_are_there() -> None:
    folder = ROOT / "requirements"
    inputs = {name for _, names in CLOSURES for name in names.split()}
    assert inputs == {path.stem for path in folder.glob("*.in")}
    assert {name for name, _ in CLOSURES} == {path.stem for path in folder.glob("*.txt")}


def test_an_import_contract_is_about_modules_that_are_there() -> None:
    assert MODULES
    places = {
        f"moejob_{dist}{path}": ROOT / SOURCES[dist] / "src" / f"moejob_{dist}{path}".replace(".", "/")
        for dist, path in MODULES
    }
    assert [
        name for name, place in places.items() if not place.is_dir() and not place.with_suffix(".py").exists()
    ] == []


@pytest.mark.parametrize("dist", ["api", "operator", "trainer", "cli"])
def test_every_room_has_its_layer(dist: str) -> None:
    """Between what starts a process and what all of it may import. Modules beside the api's packages are free."""
    root = ROOT / SOURCES[dist] / "src" / f"moejob_{dist}"
    rooms = {
        f"moejob_{dist}.{path.stem}"
        for path in root.iterdir()
        if not path.name.startswith("_") and (path.is_dir() or (path.suffix == ".py" and dist != "api"))
    }
    assert rooms - {f"moejob_{dist}{path}" for dist, path in MODULES} - APART == set()


def test_the_architecture_names_every_package_by_its_own_sentence() -> None:
    named = re.findall(r"^\| `([\w/]+)` \| (.+) \|$", ARCHITECTURE, re.MULTILINE)
    assert named == [(name, sentence(init)) for name, init in packages()]


def test_the_architecture_says_what_every_import_contract_says() -> None:
    rules = re.findall(r"^- (.+)$", ARCHITECTURE.partition("## Import rules")[2].partition("\n## ")[0], re.MULTILINE)
    contracts = re.findall(r"^name = (.+)$", (ROOT / ".importlinter").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(rules) == len(contracts)
    assert [name for rule, name in zip(rules, contracts, strict=True) if not rule.startswith(name)] == []


def packages() -> list[tuple[str, Path]]:
    """Return every package of src by its name, in the order of the distributions."""
    sources = [ROOT / folder / "src" for folder in SOURCES.values()]
    return [(str(init.parent.relative_to(src)), init) for src in sources for init in sorted(src.rglob("__init__.py"))]


def sentence(init: Path) -> str:
    """Return the first paragraph of a package's docstring, on one line."""
    said = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8"))) or ""
    return said.partition("\n\n")[0].replace("\n", " ")


def test_the_tests_that_try_what_an_audit_found_are_there() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", (ROOT / "SECURITY.md").read_text(encoding="utf-8"))
    assert len(named) > 10
    assert [path for path in named if not (ROOT / path).is_file()] == []
