"""The files under requirements/ agree with each other and with what each package asks for."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from closures import OWN, ROOT, read_pins

FILES = sorted((ROOT / "requirements").glob("*.txt"))
ENVIRONMENTS = ("operator", "trainer", "rollout", "trainer-gpu")


def asked(project: str, extra: str | None = None) -> dict[str, SpecifierSet]:
    table = tomllib.loads((ROOT / project / "pyproject.toml").read_text())["project"]
    entries = table["dependencies"] + (table["optional-dependencies"][extra] if extra else [])
    bounds = {wanted.name.lower(): wanted.specifier for wanted in map(Requirement, entries)}
    return {name: specifier for name, specifier in bounds.items() if name not in OWN}


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.name)
def test_a_closure_holds_pins_and_hashes_and_no_address(file: Path) -> None:
    line = re.compile(r" *#.*|[a-z0-9-]+==[\w.]+ \\|    --hash=sha256:[0-9a-f]{64}( \\)?")
    assert [text for text in file.read_text().splitlines() if not line.fullmatch(text) or "://" in text] == []


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_tools_change_no_closure(name: str) -> None:
    closure = read_pins(name)
    assert {
        tool: version for tool, version in read_pins("tools").items() if closure.get(tool, version) != version
    } == {}


def test_the_gpu_closure_is_the_trainer_closure_and_more() -> None:
    assert read_pins("trainer").items() < read_pins("trainer-gpu").items()


@pytest.mark.parametrize(
    ("project", "extra", "closure"),
    [
        pytest.param("crds", None, "operator", id="api beside the operator"),
        pytest.param("crds", None, "trainer", id="api beside the trainer"),
        pytest.param("operator", None, "operator", id="operator"),
        pytest.param("cli", None, "operator", id="cli"),
        pytest.param("trainer", None, "trainer", id="trainer"),
        pytest.param("trainer", "gpu", "trainer-gpu", id="trainer with its GPU extra"),
    ],
)
def test_a_closure_satisfies_the_package_that_runs_in_it(project: str, extra: str | None, closure: str) -> None:
    held = read_pins(closure)
    bounds = asked(project, extra)
    assert {
        name: (str(bound), held.get(name)) for name, bound in bounds.items() if held.get(name, "") not in bound
    } == {}
