"""The prints of commands: reports for a person, documents for programs."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING

import typer

from moejob_cli.option_types import OutputFormat

if TYPE_CHECKING:
    from rich.console import RenderableType


def print_report(answer: RenderableType) -> None:
    """Print for a person; plain and unwrapped when the output is no terminal."""
    from rich.console import Console

    # No report has an emoji, and rich takes as long to load their names as to print a report.
    if sys.stdout.isatty():
        Console(highlight=False, emoji=False).print(answer)
        return
    console = Console(highlight=False, emoji=False, color_system=None, width=200, soft_wrap=True)
    with console.capture() as captured:
        console.print(answer)
    # Tables pad their last column to the full width, which is noise in a file.
    typer.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def print_document(value: object, output: OutputFormat) -> None:
    """Print plain values as JSON or YAML."""
    if output is OutputFormat.JSON:
        text = json.dumps(value, indent=2, ensure_ascii=False)
        # JSON can escape characters that a terminal would obey, so a reader still gets the same text.
        typer.echo(text if _is_shown(text) else json.dumps(value, indent=2))
        return
    import yaml

    text = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)
    typer.echo(text if _is_shown(text) else yaml.safe_dump(value, sort_keys=False), nl=False)


def _is_shown(text: str) -> bool:
    """Return whether a text has printable characters and line ends only."""
    return text.replace("\n", "").isprintable()
