"""Pages that the site has beside docs/: the reference, which is made of the code, and the project's other pages."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.nav import Navigation

import reference_pages

ROOT = Path(__file__).parents[1]
# The project's pages, and the files that they link to.
OUTSIDE = (
    "*.md",
    "benchmarks/*.md",
    "charts/moejob/*.*",
    "charts/moejob/files/dashboard.json",
    "docs/pictures/*.svg",
    "examples/**/*.*",
)
_LINK = re.compile(r"(\]\()([^)#:]+)([^)]*\))")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that do not lie in docs/."""
    for name, text in (*reference_pages.all_pages(), *_outside_pages()):
        files.append(File.generated(config, name, content=text))
    return files


def on_nav(nav: Navigation, config: MkDocsConfig, files: Files) -> Navigation:  # noqa: ARG001 - mkdocs's names
    """Refuse a site without a front page: the logo of every page links to it, and no other check sees that link."""
    if nav.homepage is None:
        raise PluginError("the site has no front page; put docs/index.md at the top of nav in mkdocs.yml")
    return nav


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:  # noqa: ARG001 - mkdocs's names
    """Rewrite links between docs/ and the rest of the project to the places of these pages in the site."""
    here = posixpath.dirname(page.file.src_uri)

    def rewrite_link(link_match: re.Match[str]) -> str:
        return link_match[1] + _site_link(link_match[2], here) + link_match[3]

    return _LINK.sub(rewrite_link, markdown)


def _site_link(link: str, here: str) -> str:
    """Return the link as the site has it: what the tree calls docs/x is x there, everything else is project/x."""
    in_tree = here.removeprefix("project").lstrip("/") if here.startswith("project") else posixpath.join("docs", here)
    target = posixpath.normpath(posixpath.join(in_tree, link))
    if (ROOT / target).is_dir():
        target = posixpath.join(target, "README.md")
    is_picture = target.endswith(".svg") and here.startswith("project")
    placed = target.removeprefix("docs/") if target.startswith("docs/") and not is_picture else f"project/{target}"
    return posixpath.relpath(placed, here or ".")


def _outside_pages() -> Iterator[tuple[str, str]]:
    for pattern in OUTSIDE:
        # Running an example leaves compiled files beside it.
        for path in sorted(path for path in ROOT.glob(pattern) if path.suffix != ".pyc"):
            yield f"project/{path.relative_to(ROOT)}", path.read_text()
