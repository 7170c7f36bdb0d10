"""The reference leaves out nothing that the code has."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml

from documented import ROOT
from reference_pages import all_pages

PAGES = dict(all_pages())
VARIABLE = re.compile(r"\bMOEJOB_[A-Z]+(?:_[A-Z]+)*\b(?!_)")


def test_every_environment_variable_of_the_code_is_there() -> None:
    sources = [path.read_text(encoding="utf-8") for path in ROOT.glob("*/src/*/**/*.py")]
    named = {name for text in sources for name in VARIABLE.findall(text)}
    told = PAGES["reference/contract.md"] + PAGES["reference/operator.md"]
    assert len(named) > 20
    assert [name for name in named if f"`{name}`" not in told] == []


def test_a_variable_that_one_package_reads_has_a_meaning() -> None:
    rows = dict(re.findall(r"^\| `(MOEJOB_\w+)` \| `[\w.]+` \| (.*) \|$", PAGES["reference/contract.md"], re.MULTILINE))
    assert {"MOEJOB_DEBUG", "MOEJOB_TRAINER_PYTHON"} <= rows.keys()
    assert [name for name, meaning in rows.items() if not meaning] == []


def test_every_field_of_the_custom_resource_is_there() -> None:
    definition = yaml.safe_load((ROOT / "crds" / "moetrainingjobs.yaml").read_text(encoding="utf-8"))
    parts = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]
    fields = [path for part in ("spec", "status") for path in described(parts[part], part)]
    assert len(fields) > 300
    assert [path for path in fields if f"| `{path}` | " not in PAGES["reference/fields.md"]] == []


def test_every_field_has_an_anchor_of_its_own_in_the_section_of_its_part() -> None:
    page = PAGES["reference/fields.md"]
    anchors = re.findall(r'<a id="([^"]+)"></a>', page)
    assert anchors == re.findall(r"^\| `([^`]+)` \| ", page, re.MULTILINE)
    assert len(anchors) == len(set(anchors)) > 300
    for section in page.split("\n## ")[1:]:
        name, *rows = section.splitlines()
        paths = [row.split("`")[1] for row in rows if row.startswith("| `")]
        assert [path for path in paths if path != name and not path.startswith((f"{name}.", f"{name}["))] == []


def test_no_code_on_a_page_is_empty() -> None:
    assert [path for path, text in PAGES.items() if "``" in text] == []


def described(schema: dict[str, Any], path: str) -> Iterator[str]:
    """Yield the path of each field below one that has a description; items of lists are at `path[]`."""
    for name, inner in schema.get("properties", {}).items():
        if inner.get("description"):
            yield f"{path}.{name}"
        yield from described(inner, f"{path}.{name}")
    if "items" in schema:
        yield from described(schema["items"], f"{path}[]")
