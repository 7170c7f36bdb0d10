"""The decisions of `moejob run` in the record of the run, beside the events of its launchers.

A launcher that is killed records no end. The decision that follows says that it was missed, and why the run continues.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from pathlib import Path

from moejob_api.contract.pods import RunFile
from moejob_api.contract.record import SUPERVISOR_FILE, RecordEvent, RunEventKind, attempt_folder_name, record_line

# Of an attempt; no run with this many decisions is read to its end.
_MOST_BYTES = 1024 * 1024
_PRIVATE = 0o700


class DecisionRecord:
    """Appends decisions to the record of a run folder. A volume that refuses them holds up no run."""

    def __init__(self, run_folder: Path) -> None:
        self._folder = run_folder / RunFile.RECORD

    def add(self, attempt: int, message: str) -> None:
        """Add a decision that is taken now."""
        line = record_line(RecordEvent(time=round(time.time(), 3), kind=RunEventKind.DECISION, message=message))
        with suppress(OSError):
            _append_line(self._folder / attempt_folder_name(attempt) / SUPERVISOR_FILE, line.encode())


def _append_line(path: Path, line: bytes) -> None:
    path.parent.mkdir(mode=_PRIVATE, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    try:
        if os.fstat(descriptor).st_size < _MOST_BYTES:
            os.write(descriptor, line)
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
