"""Commands that pages tell readers to type: the lines behind `$` of their console blocks.

A block of another language shows a file, or what belongs to another project.
"""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
_BLOCK = re.compile(r"^( *)```console\n(.*?)^\1```", re.DOTALL | re.MULTILINE)
_MENTIONED = re.compile(r"`((?:moejob|make|kubectl) [^`\n]+)`")
_MODULE = re.compile(r"python (?:-W \w+ )?-m ([\w.]+)")
_COMMAND = re.compile(r"^ *\$ ((?:.*\\\n)*.*)", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class TypedCommand:
    """One command, and the page that shows it."""

    page: str
    command: str

    def __str__(self) -> str:
        return f"{self.page}: {self.command}"


def find_pages() -> list[Path]:
    """Every page of the project."""
    return [ROOT / name for name in run_in_shell("git ls-files '*.md'", ROOT).stdout.splitlines()]


def run_in_shell(
    command: str, folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Return the end of a command and all that it prints."""
    words = ["bash", "-c", command]
    variables = os.environ | (environment or {})
    return subprocess.run(words, cwd=folder, env=variables, capture_output=True, text=True, check=False)


def typed_commands(*begin: str) -> list[TypedCommand]:
    """The commands of all pages that begin so, in their order and each once a page."""
    found = (
        TypedCommand(page.relative_to(ROOT).as_posix(), re.sub(r"\\\n\s*", "", command))
        for page in find_pages()
        for _, block in _BLOCK.findall(page.read_text(encoding="utf-8"))
        for command in _COMMAND.findall(block)
    )
    return [one for one in dict.fromkeys(found) if not begin or one.command.startswith(begin)]


def mentioned_commands(*begin: str) -> list[TypedCommand]:
    """The commands within the text of all pages that begin so, each once."""
    found = {
        command: TypedCommand(page.relative_to(ROOT).as_posix(), command)
        for page in reversed(find_pages())
        for command in _MENTIONED.findall(page.read_text(encoding="utf-8"))
    }
    return [one for _, one in sorted(found.items()) if one.command.startswith(begin)]


def started_modules() -> set[str]:
    """Modules that any page says to start with Python, wherever it does."""
    return {module for page in find_pages() for module in _MODULE.findall(page.read_text(encoding="utf-8"))}
