"""Notices of a command that waits or reads: on standard error, so that its output stays a document."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import typer

from moejob_api.contract.texts import escaped_lines

_LINE_SECONDS = 10
# Moves to the front of a terminal's line, and clears it.
_CLEAR = "\r\x1b[K"


def print_notice(words: str) -> None:
    """Print words that may come from a cluster, without what a terminal would obey."""
    typer.echo(escaped_lines(words), err=True)


@contextmanager
def show_duration(work: str, line_seconds: int = _LINE_SECONDS) -> Iterator[None]:
    """Show how long a work of unknown share has taken: on a terminal each second, else a line now and then."""
    is_terminal, end = sys.stderr.isatty(), threading.Event()

    def show_seconds() -> None:
        seconds = 0
        while not end.wait(1 if is_terminal else line_seconds):
            seconds += 1 if is_terminal else line_seconds
            typer.echo(f"{_CLEAR if is_terminal else ''}{work} for {seconds} s", err=True, nl=not is_terminal)
        if is_terminal:
            typer.echo(_CLEAR, err=True, nl=False)

    thread = threading.Thread(target=show_seconds, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()
