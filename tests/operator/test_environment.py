"""The operator environment is its closure and the tools, nothing else, and all of it loads."""

from __future__ import annotations

import pytest

from closures import find_modules, find_strays, import_errors, wrong_versions

MODULES = find_modules("operator")
NAMES = [module for tops in MODULES.values() for module in tops]


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return import_errors(NAMES, tmp_path_factory.mktemp("imports") / "errors.json")


@pytest.mark.parametrize("module", NAMES)
def test_every_module_of_the_closure_loads(module: str, errors: dict[str, str]) -> None:
    assert errors.get(module) is None


def test_every_distribution_of_the_closure_has_a_module() -> None:
    assert [name for name, tops in MODULES.items() if not tops] == []


def test_versions_are_the_pinned_ones() -> None:
    assert wrong_versions("operator") == {}


def test_nothing_else_is_installed() -> None:
    assert find_strays("operator") == set()
