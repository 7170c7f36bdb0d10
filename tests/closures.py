"""Owns what requirements/*.txt say, and what an environment really holds."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from importlib.machinery import EXTENSION_SUFFIXES
from importlib.metadata import Distribution, distributions
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).parent.parent
OWN = frozenset({"moejob", "moejob-api", "moejob-client", "moejob-operator", "moejob-rollout", "moejob-trainer"})

_PIN = re.compile(r"^([a-z0-9-]+)==(\S+) \\$", re.MULTILINE)
# A bare .so at the top of a wheel is one of NVIDIA's C libraries; a Python module names its interpreter.
_MODULES = (".py", *(suffix for suffix in EXTENSION_SUFFIXES if suffix != ".so"))

# In a process of its own: what a hundred packages do to the interpreter as they load is not the other tests' business.
_IMPORT_ALL = """
import importlib, json, sys

errors = {}
for name in json.load(sys.stdin):
    try:
        importlib.import_module(name)
    except Exception as error:
        errors[name] = repr(error)
with open(sys.argv[1], "w") as answer:
    json.dump(errors, answer)
"""


def read_pins(name: str) -> dict[str, str]:
    """The version of each distribution in requirements/NAME.txt."""
    return dict(_PIN.findall((ROOT / "requirements" / f"{name}.txt").read_text()))


def installed_versions() -> dict[str, Distribution]:
    """The distributions of this environment by their normalized names, ours left out."""
    found = {re.sub(r"[-_.]+", "-", dist.name).lower(): dist for dist in _distributions()}
    return {name: dist for name, dist in found.items() if name not in OWN}


def wrong_versions(name: str) -> dict[str, tuple[str, str | None]]:
    """Pinned and installed version of each distribution of requirements/NAME.txt where the two differ."""
    held = {found: dist.version for found, dist in installed_versions().items()}
    return {
        pinned: (version, held.get(pinned))
        for pinned, version in read_pins(name).items()
        if held.get(pinned) != version
    }


def find_strays(name: str) -> set[str]:
    """Return what is installed and neither in requirements/NAME.txt nor a tool."""
    return installed_versions().keys() - read_pins(name).keys() - read_pins("tools").keys()


def find_modules(name: str) -> dict[str, list[str]]:
    """The modules at the top of each distribution of requirements/NAME.txt, as far as it is installed."""
    found = installed_versions()
    return {pinned: top_modules(found[pinned]) for pinned in read_pins(name) if pinned in found}


def top_modules(dist: Distribution) -> list[str]:
    """The importable modules nearest the root: `yaml`, and `cuda.pathfinder` where `cuda` itself is but a namespace."""
    files = [PurePosixPath(file) for file in dist.files or ()]
    packages = {file.parent for file in files if file.name == "__init__.py"}
    code = (_module(file) for file in files if file.name.endswith(_MODULES))
    tops = {module for module in code if _importable(module) and not packages.intersection(module.parents)}
    return sorted(".".join(module.parts) for module in tops)


def import_errors(names: list[str], answer: Path) -> dict[str, str]:
    """Return what each import raises that fails."""
    command = [sys.executable, "-W", "ignore", "-c", _IMPORT_ALL, str(answer)]
    subprocess.run(command, input=json.dumps(names), text=True, check=True, cwd=answer.parent)
    errors: dict[str, str] = json.loads(answer.read_text())
    return errors


def _distributions() -> Iterable[Distribution]:
    # Not sys.path: an import of setuptools adds its vendored packages there.
    return distributions(path=sorted({sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}))


def _module(file: PurePosixPath) -> PurePosixPath:
    return file.parent if file.name == "__init__.py" else file.with_name(file.name.partition(".")[0])


def _importable(module: PurePosixPath) -> bool:
    return all(part.isidentifier() for part in module.parts)
