"""The site has a front page, where each page's logo leads; `make docs`, which builds it, is no part of the tests."""

from __future__ import annotations

import re

from documented import ROOT

NAVIGATION = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:\n")[2]


def test_the_front_page_is_at_the_top_of_the_navigation() -> None:
    """MkDocs calls a page the home page only there."""
    first = next(line for line in NAVIGATION.splitlines() if not line.lstrip().startswith("#"))
    assert first == "  - Home: index.md"
    assert (ROOT / "docs" / "index.md").is_file()


def test_a_link_of_the_front_page_leads_to_a_page_of_the_navigation() -> None:
    links = re.findall(r"\]\(([^)#:]+\.md)", (ROOT / "docs" / "index.md").read_text(encoding="utf-8"))
    placed = [f"project/{link.removeprefix('../')}" if link.startswith("../") else link for link in links]
    assert len(placed) > 20
    assert [link for link in placed if f"{link}\n" not in NAVIGATION] == []
