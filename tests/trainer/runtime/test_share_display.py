"""The share of a long work is a bar on a terminal, and a line every ten seconds elsewhere."""

from __future__ import annotations

import io

from moejob_trainer.runtime.heartbeats import ignore_share
from moejob_trainer.runtime.share_display import LINE_SECONDS, ShareDisplay, open_share_display


class Terminal(io.StringIO):
    """A terminal, as far as a program can ask."""

    def isatty(self) -> bool:
        return True


def show_seconds(stream: io.StringIO, seconds: int) -> str:
    """Return what is written while a work of this duration reports ten times a second."""
    now = [0.0]
    display = ShareDisplay("exporting", stream, lambda: now[0])
    for tenth in range(1, seconds * 10 + 1):
        now[0] = tenth / 10
        display(tenth, seconds * 10)
    return stream.getvalue()


def test_a_file_gets_a_line_every_ten_seconds() -> None:
    assert show_seconds(io.StringIO(), 40).splitlines() == [f"exporting: {share} %" for share in (25, 50, 75, 100)]
    assert show_seconds(io.StringIO(), int(LINE_SECONDS) - 1) == ""


def test_a_terminal_gets_a_bar_that_ends_with_its_line() -> None:
    text = show_seconds(Terminal(), 2)
    bars = text.split("\r")[1:]
    assert bars[0] == f"exporting [{'##':<40}]   5 %"
    assert bars[-1] == f"exporting [{'#' * 40}] 100 %\n"
    assert text.count("\n") == 1


def test_a_work_without_an_end_shows_nothing() -> None:
    stream = io.StringIO()
    ShareDisplay("exporting", stream, iter((0.0, 99.0)).__next__)(5, 0)
    assert stream.getvalue() == ""


def test_without_a_descriptor_nothing_is_shown() -> None:
    assert open_share_display("exporting", None) is ignore_share
