"""Output of ranks: read from pipes, passed on line by line with the rank's number, its last line remembered.

One thread reads for all ranks of a round. Where the pod's log is not read any more, the run continues.
"""

from __future__ import annotations

import os
import re
import selectors
import sys
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path

from moejob_api.contract.pods import escaped_lines
from moejob_api.contract.record import MOST_LINES
from moejob_trainer.launcher.log import LauncherLog

log = LauncherLog()

_CHUNK = 64 * 1024
# A line without an end is passed on in pieces of this size.
_LONGEST_LINE = 16 * 1024
# More of it fits into no message.
_LAST_LINE_CHARACTERS = 2048
# The pipe of a dead rank ends at once, unless a child of the rank holds it open.
_LAST_WORD_SECONDS = 0.5
_UNUSUAL = re.compile(rb"[^\t\r\n -~]")
# Progress bars go back to the start of the line instead of ending it. A pattern of whole lines would look for the end
# of an unfinished one from each of its letters, and keep the launcher's other threads from running meanwhile.
_LINE_END = re.compile(rb"[\r\n]+")


@dataclass(slots=True)
class _Stream:
    rank: int
    reader: Connection
    is_errors: bool
    unfinished_line: bytes = b""


@dataclass(slots=True)
class _LogFile:
    path: Path
    descriptor: int | None = None
    is_broken: bool = field(default=False)

    def write(self, text: bytes) -> None:
        if self.is_broken:
            return
        try:
            if self.descriptor is None:
                self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                self.descriptor = os.open(self.path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
            os.write(self.descriptor, text)
        except OSError as error:
            self.is_broken = True
            log.warning("the log of a rank is not written any more", path=str(self.path), error=str(error))

    def close(self) -> None:
        if self.descriptor is not None:
            os.close(self.descriptor)
            self.descriptor = None


def shown_line(line: bytes) -> bytes:
    """Return a line of a rank with what a terminal would obey escaped: its words may be those of a stranger's data."""
    if not _UNUSUAL.search(line):
        return line
    text = line.rstrip(b"\r\n")
    # Letters that are cut at the end of a read, and bytes that are none, are escaped as well.
    return escaped_lines(text.decode(errors="backslashreplace")).encode() + line[len(text) :]


class RankOutput:
    """The output of the ranks of one round: `readers` are standard output and standard error of each rank."""

    def __init__(self, readers: Mapping[int, tuple[Connection, Connection]], logs: Path | None) -> None:
        self._last_lines: dict[int, str] = {}
        # Of both streams, for the record of the run.
        self._tails: dict[int, deque[str]] = {rank: deque(maxlen=MOST_LINES) for rank in readers}
        self._end_events = {rank: threading.Event() for rank in readers}
        self._files = {rank: _LogFile(logs / f"rank-{rank}.log") for rank in readers} if logs is not None else {}
        self._selector = selectors.DefaultSelector()
        for rank, pair in readers.items():
            for reader, is_errors in zip(pair, (False, True), strict=True):
                os.set_blocking(reader.fileno(), False)
                self._selector.register(reader, selectors.EVENT_READ, _Stream(rank, reader, is_errors))
        self._is_ending = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._read_streams, name="output of ranks", daemon=True)
        self._thread.start()

    def last_line(self, rank: int) -> str:
        """The last line of standard error of a rank that has ended; empty when it had nothing to complain about."""
        self._end_events[rank].wait(timeout=_LAST_WORD_SECONDS)
        return self._last_lines.get(rank, "")

    def read_tail(self, rank: int) -> Sequence[str]:
        """Return the last lines of a rank, the newest last."""
        return list(self._tails.get(rank, ()))

    def add_lines(self, rank: int, lines: Sequence[str]) -> None:
        """Add lines about a rank that it did not print itself."""
        for line in lines:
            self._pass_line_on(rank, line.encode(errors="backslashreplace") + b"\n")

    def read_to_end(self) -> None:
        """Read the rest once the ranks have ended. It waits 5 s at most: children of ranks may hold the pipes open."""
        self._is_ending.set()
        self._thread.join(timeout=5.0)

    def _read_streams(self) -> None:
        while self._selector.get_map():
            was_ending = self._is_ending.is_set()
            ready = self._selector.select(0.0 if was_ending else 0.1)
            for key, _ in ready:
                self._read_stream(key.data)
            if was_ending and not ready:
                break
        self._close_streams()

    def _read_stream(self, stream: _Stream) -> None:
        try:
            text = os.read(stream.reader.fileno(), _CHUNK)
        except BlockingIOError:
            return
        if not text:
            self._selector.unregister(stream.reader)
            self._flush_stream(stream)
            if stream.is_errors:
                self._end_events[stream.rank].set()
            return
        stream.unfinished_line += text
        begin = 0
        for end in _LINE_END.finditer(stream.unfinished_line):
            self._take_line(stream, stream.unfinished_line[begin : end.end()])
            begin = end.end()
        stream.unfinished_line = stream.unfinished_line[begin:]
        if len(stream.unfinished_line) >= _LONGEST_LINE:
            self._flush_stream(stream)

    def _flush_stream(self, stream: _Stream) -> None:
        if stream.unfinished_line:
            self._take_line(stream, stream.unfinished_line + b"\n")
            stream.unfinished_line = b""

    def _take_line(self, stream: _Stream, line: bytes) -> None:
        if stream.is_errors and line.strip():
            self._last_lines[stream.rank] = line.decode(errors="replace").strip()[:_LAST_LINE_CHARACTERS]
        self._pass_line_on(stream.rank, line)

    def _pass_line_on(self, rank: int, line: bytes) -> None:
        line = shown_line(line)
        with self._lock:
            self._tails[rank].append(line.decode(errors="replace").rstrip("\r\n")[:_LAST_LINE_CHARACTERS])
            if rank in self._files:
                self._files[rank].write(line)
            try:
                sys.stdout.buffer.write(b"[rank %d] %s" % (rank, line))
                sys.stdout.buffer.flush()
            except (OSError, ValueError):
                return

    def _close_streams(self) -> None:
        for key in list(self._selector.get_map().values()):
            self._flush_stream(key.data)
            key.data.reader.close()
        self._selector.close()
        for file in self._files.values():
            file.close()
