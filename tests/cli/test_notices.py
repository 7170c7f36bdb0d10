"""The duration of a work that tells no share: lines for a log, one line of a terminal."""

from __future__ import annotations

import os
import pty
import subprocess
import sys

WAIT = """
import sys
from moejob_cli.notices import show_duration
with show_duration("loading the model", line_seconds=1):
    sys.stdin.readline()
print("loaded")
"""


def test_seconds_are_lines_where_no_terminal_is() -> None:
    with subprocess.Popen(
        [sys.executable, "-c", WAIT],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        assert [process.stderr.readline() for _ in range(2)] == [f"loading the model for {n} s\n" for n in (1, 2)]
        assert process.communicate("\n")[0] == "loaded\n"


def test_seconds_are_one_line_of_a_terminal_which_is_cleared_at_the_end() -> None:
    manager, terminal = pty.openpty()
    with subprocess.Popen([sys.executable, "-c", WAIT], stdin=subprocess.PIPE, stderr=terminal, text=True) as process:
        os.close(terminal)
        shown = ""
        while "for 2 s" not in shown:
            shown += os.read(manager, 1000).decode()
        process.communicate("\n")
        shown += os.read(manager, 1000).decode()
    os.close(manager)
    assert shown.startswith("\r\x1b[Kloading the model for 1 s\r\x1b[Kloading the model for 2 s")
    assert shown.endswith("\r\x1b[K")
    assert "\n" not in shown
