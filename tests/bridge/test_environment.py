"""The bridge's environment is its closure and the tools, nothing else, and all of it loads."""

from __future__ import annotations

from pathlib import Path

import pytest

from closures import find_modules, find_strays, import_errors, wrong_versions

# Imported by the other tests, with stand-ins for what it names and never uses.
_WITH_STAND_INS = "megatron.bridge"


@pytest.mark.thorough
def test_every_module_of_the_closure_loads(tmp_path: Path) -> None:
    names = [module for tops in find_modules("bridge").values() for module in tops if module != _WITH_STAND_INS]
    assert import_errors(names, tmp_path / "errors.json") == {}


def test_versions_are_the_pinned_ones() -> None:
    assert wrong_versions("bridge") == {}


def test_nothing_else_is_installed() -> None:
    assert find_strays("bridge") == set()
