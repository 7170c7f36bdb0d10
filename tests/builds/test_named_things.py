"""`make lock` and the import contracts name only what exists, and leave nothing out."""

from __future__ import annotations

import re

from image_builds.recipes import ROOT

SOURCES = {"api": "crds", "operator": "operator", "trainer": "trainer", "rollout": "rollout", "cli": "cli"}
MODULES = sorted(set(re.findall(r"moejob_(\w+?)((?:\.\w+)*)(?=\s|$)", (ROOT / ".importlinter").read_text())))
CLOSURES = re.findall(r"call compile,([a-z-]+),([a-z -]+)", (ROOT / "Makefile").read_text())


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


def test_every_room_of_operator_and_trainer_has_its_layer() -> None:
    """Between what starts a process and what all of it may import."""
    apart = {"moejob_operator.admission", "moejob_operator.handlers", "moejob_operator.installed"}
    named = {f"moejob_{dist}{path}" for dist, path in MODULES}
    for dist in ("operator", "trainer"):
        root = ROOT / SOURCES[dist] / "src" / f"moejob_{dist}"
        rooms = {
            f"moejob_{dist}.{path.stem}"
            for path in root.iterdir()
            if not path.name.startswith("_") and (path.is_dir() or path.suffix == ".py")
        }
        assert rooms - named - apart == set()
