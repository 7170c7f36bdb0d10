"""The modules of tests/cluster/nodes are layers, as their README says."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

NODES = Path(__file__).parents[1] / "cluster" / "nodes"
ROWS = re.findall(r"^\| \w+ \| (`.+`.*?) \|", (NODES / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
LAYERS = {name: layer for layer, row in enumerate(ROWS) for name in re.findall(r"`(\w+)`", row)}
MODULES = sorted(
    path.stem for path in NODES.glob("*.py") if not path.stem.startswith(("test_", "__")) and path.stem != "conftest"
)


def imported(module: str) -> set[str]:
    tree = ast.parse((NODES / f"{module}.py").read_text(encoding="utf-8"))
    names = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    return {name.removeprefix("cluster.nodes.") for name in names if name.startswith("cluster.nodes.")}


def test_the_readme_names_every_module() -> None:
    assert sorted(LAYERS) == MODULES


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_no_layer_after_its_own(module: str) -> None:
    assert {name for name in imported(module) if LAYERS[name] > LAYERS[module]} == set()
