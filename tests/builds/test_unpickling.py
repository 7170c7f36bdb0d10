"""The sources unpickle nothing that another process may have written: a pickle runs code of its author's choice."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for package in ("crds", "operator", "trainer", "rollout", "cli")
    for path in (ROOT / package).rglob("src/**/*.py")
)

MODULES = frozenset({"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"})
COLLECTIVES = frozenset(
    {
        "all_gather_object",
        "broadcast_object_list",
        "gather_object",
        "recv_object_list",
        "scatter_object_list",
        "send_object_list",
    }
)
# Reads the index of a checkpoint of Megatron's, a pickle, with an Unpickler that knows a list of plain classes alone.
RESTRICTED = Path("trainer/src/moejob_trainer/interchange/torch_dist.py")


def unpickling(source: str) -> Iterator[str]:
    """Yield each way in which a module could unpickle."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import(names=names):
                yield from (alias.name for alias in names if alias.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module), names=names):
                yield from (module for _ in names if module.split(".")[0] in MODULES)
                yield from (alias.name for alias in names if alias.name in COLLECTIVES)
            case ast.Attribute(attr=attr) if attr in COLLECTIVES:
                yield attr
            case ast.Call(func=ast.Attribute(value=ast.Name(id=module), attr="load")):
                yield from _loads(module, node)
            case _:
                pass


def _loads(module: str, call: ast.Call) -> Iterator[str]:
    said = {keyword.arg: getattr(keyword.value, "value", None) for keyword in call.keywords}
    if module == "torch" and said.get("weights_only") is not True:
        yield "torch.load without weights_only=True"
    if module in {"np", "numpy"} and said.get("allow_pickle") is not False:
        yield "numpy.load without allow_pickle=False"


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "from pickle import loads",
        "import torch.distributed as dist\ndist.all_gather_object(a, b)",
        "from torch.distributed import broadcast_object_list",
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import numpy as np\nnp.load(path)",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
    ],
)
def test_each_way_to_unpickle_is_found(source: str) -> None:
    assert [*unpickling(source)]


def test_no_source_unpickles() -> None:
    assert len(SOURCES) > 300
    found = {str(path.relative_to(ROOT)): ways for path in SOURCES if (ways := [*unpickling(path.read_text())])}
    assert found == {str(RESTRICTED): ["pickle"]}


def test_the_one_unpickler_finds_named_classes_alone() -> None:
    tree = ast.parse((ROOT / RESTRICTED).read_text())
    called = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    assert not {name for name in called if name.startswith("pickle.") and name != "pickle.UnpicklingError"}
    (unpickler,) = (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and "Unpickler" in node.name)
    assert "find_class" in {node.name for node in ast.walk(unpickler) if isinstance(node, ast.FunctionDef)}
