"""Output of ranks is bounded, whatever they write."""

from __future__ import annotations

import os
from multiprocessing import Pipe
from pathlib import Path

import pytest

from moejob_trainer.launcher.output import _CHUNK, _LAST_LINE_CHARACTERS, _LONGEST_LINE, RankOutput, shown_line

SIZE = 1 << 18


def test_a_line_without_an_end_is_passed_on_in_pieces(
    tmp_path: Path, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    (reader, writer), (errors, errors_writer) = Pipe(duplex=False), Pipe(duplex=False)
    output = RankOutput({3: (reader, errors)}, tmp_path)
    for end in (writer, errors_writer):
        _write_all(end.fileno(), b"x" * SIZE)
        end.close()
    last = output.last_line(3)
    output.read_to_end()
    pieces = (tmp_path / "rank-3.log").read_bytes().splitlines()
    assert sum(map(len, pieces)) == 2 * SIZE
    assert max(map(len, pieces)) < _LONGEST_LINE + _CHUNK
    assert last == "x" * _LAST_LINE_CHARACTERS
    assert max(map(len, capfdbinary.readouterr().out.splitlines())) < len("[rank 3] ") + _LONGEST_LINE + _CHUNK


@pytest.mark.parametrize(
    ("line", "shown"),
    [
        pytest.param(b"step 3 \t loss 1.5\n", b"step 3 \t loss 1.5\n", id="usual"),
        pytest.param(b"10%\r", b"10%\r", id="progress bar"),
        pytest.param("Größe 大\n".encode(), "Größe 大\n".encode(), id="other scripts"),
        pytest.param("\x1b[2J\x9b31m\u202egnirts\n".encode(), rb"\x1b[2J\x9b31m\u202egnirts" + b"\n", id="obeyed"),
        pytest.param(b"\x9b31m \xff\n", rb"\x9b31m \xff" + b"\n", id="no UTF-8"),
    ],
)
def test_what_a_terminal_would_obey_is_escaped(line: bytes, shown: bytes) -> None:
    assert shown_line(line) == shown


def _write_all(descriptor: int, text: bytes) -> None:
    while text:
        text = text[os.write(descriptor, text) :]
