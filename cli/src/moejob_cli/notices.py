"""Notices of a command that waits or reads: on standard error, so that its output stays a document."""

from __future__ import annotations

import typer

from moejob_api.contract.texts import escaped_lines


def print_notice(words: str) -> None:
    """Print words that may come from a cluster, without what a terminal would obey."""
    typer.echo(escaped_lines(words), err=True)
