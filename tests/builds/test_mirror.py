"""The folders of tests mirror the packages of src, both ways: what tests a package lies where the package does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = {
    "api": "crds",
    "operator": "operator",
    "trainer": "trainer",
    "rollout": "rollout",
    "client": "client",
    "cli": "cli",
}

# Folders of tests without a package, each with the reason.
APART: Mapping[str, str] = {
    "cli/stand_in": "a launcher that `moejob run` starts in place of the trainer's",
    "operator/golden": "manifests that the operator makes, written by `make generate`",
    "trainer/benchmarks": "benchmarks of the trainer, which are not part of its package",
    "trainer/data/templates": "published chat templates, which tests of several folders read",
    "trainer/parity": "whole engines in every layout, held against references of Transformers",
}
# Packages without a folder of tests, each with where it is tested.
ELSEWHERE: Mapping[str, str] = {
    "rollout/transfer": "trainer/rollouts/transports: ranks of the trainer send the weights",
    "trainer/setup": "trainer: whole runs put a rank together, and setup decides nothing that a part could",
}


def folders(dist: str) -> set[str]:
    """Return the folders that hold files of tests, without those inside one that stands apart."""
    root = ROOT / "tests"
    files = [path for path in (root / dist).rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    found = {
        str(parent.relative_to(root)) for path in files for parent in path.parents if root / dist in parent.parents
    }
    return {name for name in found if not any(name.startswith(f"{apart}/") for apart in APART)}


def packages(dist: str) -> set[str]:
    """Return the packages below the distribution's own, as folders of tests are named."""
    root = ROOT / SOURCES[dist] / "src" / f"moejob_{dist}"
    return {str(Path(dist) / path.parent.relative_to(root)) for path in root.glob("*/**/__init__.py")}


@pytest.mark.parametrize("dist", SOURCES)
def test_a_folder_of_tests_has_the_name_of_a_package_or_stands_apart_for_a_reason(dist: str) -> None:
    assert sorted(folders(dist) - packages(dist)) == sorted(name for name in APART if name.startswith(f"{dist}/"))


@pytest.mark.parametrize("dist", SOURCES)
def test_a_package_has_a_folder_with_tests_or_is_tested_elsewhere_for_a_reason(dist: str) -> None:
    tested = {name for name in folders(dist) if any((ROOT / "tests" / name).glob("test_*.py"))}
    assert sorted(packages(dist) - tested) == sorted(name for name in ELSEWHERE if name.startswith(f"{dist}/"))


def test_what_is_tested_elsewhere_is_tested_there() -> None:
    for place in ELSEWHERE.values():
        assert any((ROOT / "tests" / place.partition(":")[0]).glob("test_*.py"))
