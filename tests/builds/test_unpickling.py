"""The sources unpickle nothing that another process may have written: a pickle runs code of its author's choice."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = sorted(
    path
    for package in ("crds", "operator", "trainer", "rollout", "client", "cli")
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

# Loads that unpickle unless they are asked not to: by module, the argument and the value that it must have.
LOADS = {
    "torch": ("weights_only", True),
    "torch.serialization": ("weights_only", True),
    "numpy": ("allow_pickle", False),
}
# PyYAML's loaders that make no objects but plain ones.
SAFE_LOADERS = frozenset({"SafeLoader", "CSafeLoader", "BaseLoader", "CBaseLoader"})
UNSAFE_YAML = frozenset({"full_load", "full_load_all", "unsafe_load", "unsafe_load_all"})
# A connection of multiprocessing unpickles what it receives. Sockets have a method of this name, with a size.
CONNECTIONS = frozenset({"multiprocessing.connection.Client", "multiprocessing.connection.Listener"})


def unpickling(source: str) -> Iterator[str]:
    """Yield each way in which a module could unpickle."""
    tree = ast.parse(source)
    names = _imported(tree)
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                yield from (alias.name for alias in aliases if alias.name.split(".")[0] in MODULES)
            case ast.ImportFrom(module=str(module), names=aliases):
                yield from (module for _ in aliases if module.split(".")[0] in MODULES)
                yield from (alias.name for alias in aliases if alias.name in COLLECTIVES)
            case ast.Attribute(attr=attr) if attr in COLLECTIVES:
                yield attr
            case ast.Attribute() | ast.Name():
                yield from _named(_full_name(node, names))
            case ast.Call(func=ast.Attribute(attr="recv"), args=[], keywords=[]):
                yield "recv of a connection of multiprocessing"
            case _:
                pass
        if isinstance(node, ast.Call):
            yield from _called(_full_name(node.func, names), node)


def _imported(tree: ast.Module) -> dict[str, str]:
    """Return the full name of everything that is imported, by the name that the module gives it."""
    found = {}
    for node in ast.walk(tree):
        match node:
            case ast.Import(names=aliases):
                for alias in aliases:
                    found[alias.asname or alias.name.split(".")[0]] = (
                        alias.name if alias.asname else alias.name.split(".")[0]
                    )
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                found |= {alias.asname or alias.name: f"{module}.{alias.name}" for alias in aliases}
            case _:
                pass
    return found


def _full_name(node: ast.expr, names: Mapping[str, str]) -> str:
    match node:
        case ast.Attribute(value=value, attr=attr):
            return f"{_full_name(value, names)}.{attr}"
        case ast.Name(id=name):
            return names.get(name, name)
        case _:
            return ""


def _named(name: str) -> Iterator[str]:
    module, _, function = name.rpartition(".")
    if name in CONNECTIONS or (module == "yaml" and function in UNSAFE_YAML):
        yield name


def _called(name: str, call: ast.Call) -> Iterator[str]:
    module, _, function = name.rpartition(".")
    said = {keyword.arg: keyword.value for keyword in call.keywords}
    if function == "load" and module in LOADS:
        argument, safe = LOADS[module]
        if getattr(said.get(argument), "value", None) is not safe:
            yield f"{name} without {argument}={safe}"
    if name in {"yaml.load", "yaml.load_all"}:
        loader = call.args[1] if len(call.args) > 1 else said.get("Loader")
        if loader is None or ast.unparse(loader).rpartition(".")[2] not in SAFE_LOADERS:
            yield f"{name} without a safe loader"


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
        "from numpy import load\nload(path)",
        "from torch import load\nload(path)",
        "from torch import load as loaded\nloaded(path, weights_only=False)",
        "import torch as t\nt.load(path)",
        "import torch\ntorch.serialization.load(path)",
        "from torch import serialization\nserialization.load(path)",
        "from torch.serialization import load\nload(path)",
        "from multiprocessing import Pipe\nreader, writer = Pipe()\nreader.recv()",
        "from multiprocessing.connection import Client\nClient(address)",
        "from multiprocessing import connection\nconnection.Listener(address)",
        "import yaml\nyaml.load(text)",
        "import yaml\nyaml.load(text, Loader=yaml.FullLoader)",
        "import yaml\nyaml.load(text, yaml.UnsafeLoader)",
        "import yaml\nyaml.unsafe_load(text)",
        "from yaml import load, Loader\nload(text, Loader)",
        "from yaml import full_load_all\nfull_load_all(text)",
    ],
)
def test_each_way_to_unpickle_is_found(source: str) -> None:
    assert [*unpickling(source)]


@pytest.mark.parametrize(
    "source",
    [
        "from torch import load\nload(path, weights_only=True)",
        "import torch\ntorch.serialization.load(path, weights_only=True)",
        "import numpy as np\nnp.load(path, allow_pickle=False)",
        "import json\njson.load(file)",
        "import yaml\nyaml.load(text, Loader=yaml.CSafeLoader)",
        "import yaml\nyaml.safe_load(text)",
        "peer.recv(32, socket.MSG_WAITALL)",
        "from multiprocessing.connection import Connection, wait\nconnection.recv_bytes()",
    ],
)
def test_what_unpickles_nothing_is_left_alone(source: str) -> None:
    assert not [*unpickling(source)]


def test_no_source_unpickles() -> None:
    assert len(SOURCES) > 300
    found = {str(path.relative_to(ROOT)): ways for path in SOURCES if (ways := [*unpickling(path.read_text())])}
    assert found == {}
