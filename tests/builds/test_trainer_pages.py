"""The pages of the trainer: the map names every module, and every page is found from the first one."""

from __future__ import annotations

import re

from documented import ROOT

PAGE = (ROOT / "docs" / "trainer.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "trainer" / "src" / "moejob_trainer"


def test_the_map_names_every_module_of_the_package_once() -> None:
    named = re.findall(r"^  ([\w.]+/?)  +\S", PAGE.partition("moejob_trainer/\n")[2].partition("```")[0], re.MULTILINE)
    modules = [
        f"{path.name}/" if path.is_dir() else path.name
        for path in PACKAGE.iterdir()
        if (path / "__init__.py").is_file() or (path.suffix == ".py" and path.stem != "__init__")
    ]
    assert sorted(named) == sorted(modules)


def test_the_first_page_and_the_navigation_lead_to_every_page() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = sorted(f"trainer/{path.name}" for path in (ROOT / "docs" / "trainer").glob("*.md"))
    assert len(pages) > 5
    assert [page for page in pages if f"({page})" not in PAGE or f"- {page}\n" not in navigation] == []
