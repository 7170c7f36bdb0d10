"""The launcher's side of a run's record: events go to the run folder from a thread, and never hold up the launcher.

A volume may hang for minutes; a launcher that waited for it would be lost to its peers. The run folder belongs to
another job until its owner file has been checked, so events wait in memory until the folder names this job. Each batch
of lines is synced before the next: after a loss of power the record ends earlier, with whole lines.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from moejob_api.contract.pods import RunFile, RunOwner
from moejob_api.contract.record import (
    MOST_LINES,
    MOST_LINES_BYTES,
    RecordEvent,
    RunEventKind,
    attempt_folder_name,
    parse_attempt_folder,
    pod_record_name,
    record_line,
)
from moejob_trainer.launcher.log import LauncherLog
from moejob_trainer.launcher.pod import TrainerPod
from moejob_trainer.runtime.disk import Disk, cut_half_line, remove_tree
from moejob_trainer.runtime.redaction import Redaction

log = LauncherLog()

# Bytes of a file with lines of ranks; events alone go on for an eighth more.
MOST_BYTES = 4 * 1024 * 1024
_MOST_WAITING = 2_000
MOST_ATTEMPTS = 64
# Time to write the events that wait when the launcher ends.
_CLOSE_SECONDS = 5.0
_BATCH_SECONDS, _RETRY_SECONDS = 0.05, 0.2
_PRIVATE = 0o700


@dataclass(slots=True)
class RecordFile:
    """The file of one pod in one attempt; only one thread may use it."""

    pod: TrainerPod
    disk: Disk = field(default_factory=Disk)
    most_bytes: int = MOST_BYTES
    _bytes: int | None = field(init=False, default=None)

    @property
    def path(self) -> Path:
        """The file of this pod."""
        return (
            self.pod.run_folder
            / RunFile.RECORD
            / attempt_folder_name(self.pod.attempt)
            / pod_record_name(self.pod.index)
        )

    def is_ours(self) -> bool:
        """Return whether the run folder names this job as its owner."""
        try:
            owner = RunOwner.model_validate_json((self.pod.run_folder / RunFile.OWNER).read_bytes())
        except (OSError, ValidationError):
            return False
        return owner == RunOwner(job=self.pod.job, uid=self.pod.uid)

    def write_events(self, events: Sequence[RecordEvent]) -> None:
        """Append events, those with lines of ranks only while there is room for them."""
        if self._bytes is None:
            self._bytes = self._open_file()
        content = b"".join(self._fitting_lines(events))
        if content:
            self.disk.append(self.path, content)

    def _open_file(self) -> int:
        """Make the folders and mend the file of an earlier launcher of this pod; its size."""
        attempt = self.path.parent
        for folder in (attempt.parent, attempt):
            self.disk.make_folder(folder, _PRIVATE)
            self.disk.sync(folder.parent)
        if self.pod.is_first:
            self._remove_old_attempts(attempt.parent)
        cut_half_line(self.disk, self.path)
        return self.path.stat().st_size if self.path.exists() else 0

    def _remove_old_attempts(self, folder: Path) -> None:
        """Keep the first attempt, which says how the run began, and the newest."""
        attempts = sorted(path.name for path in folder.iterdir() if parse_attempt_folder(path.name) is not None)
        for name in attempts[1 : 1 - MOST_ATTEMPTS]:
            remove_tree(self.disk, folder / name)

    def _fitting_lines(self, events: Sequence[RecordEvent]) -> list[bytes]:
        lines = []
        for event in events:
            line = record_line(self._fitting_event(event)).encode()
            if self._size + len(line) > self.most_bytes + self.most_bytes // 8:
                continue
            self._bytes = self._size + len(line)
            lines.append(line)
        return lines

    def _fitting_event(self, event: RecordEvent) -> RecordEvent:
        is_full = bool(event.lines) and self._size + len(record_line(event)) > self.most_bytes
        return event.model_copy(update={"lines": (), "kind": RunEventKind.FULL}) if is_full else event

    @property
    def _size(self) -> int:
        return self._bytes or 0


class LauncherRecord:
    """The record of one launcher. `add` may be called by its main thread only, `close` once."""

    def __init__(self, file: RecordFile, redaction: Redaction) -> None:
        self._file, self._redaction = file, redaction
        self._waiting: deque[RecordEvent] = deque(maxlen=_MOST_WAITING)
        self._changed = threading.Condition()
        self._is_closing = False
        # A daemon: a launcher on a dead volume must be able to end.
        self._thread = threading.Thread(target=self._write_all, name="record", daemon=True)
        self._thread.start()

    def add(self, kind: RunEventKind, **fields: Any) -> None:
        """Add an event that happens now."""
        pod = self._file.pod
        message = self._redaction.redact_text(fields.pop("message", ""))
        event = RecordEvent(time=round(time.time(), 3), kind=kind, pod=pod.index, message=message, **fields)
        with self._changed:
            self._waiting.append(event)
            self._changed.notify()

    def add_last_lines(self, rank: int, restart: int, lines: Sequence[str], most_bytes: int) -> None:
        """Add the last lines of a rank, as many as an event keeps."""
        redacted = [self._redaction.redact_text(line) for line in lines]
        shown = last_lines(redacted, min(most_bytes, MOST_LINES_BYTES))
        if shown:
            cut = sum(map(len, redacted)) - sum(map(len, shown))
            self.add(RunEventKind.LAST_LINES, rank=rank, restart=restart, lines=shown, cut=cut)

    def close(self) -> None:
        """Write the events that wait, and give up after a few seconds: the volume may hang."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(_CLOSE_SECONDS)

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closing or bool(self._waiting), timeout=0.5)
                is_last, has_events = self._is_closing, bool(self._waiting)
            if has_events and not self._write_waiting():
                return
            if is_last:
                return
            # Events of one moment share a sync; a folder that is not ours yet is looked at again.
            time.sleep(_RETRY_SECONDS if self._waiting else _BATCH_SECONDS)

    def _write_waiting(self) -> bool:
        """Write what waits, once the folder is ours; False after an error, which ends the record."""
        try:
            if not self._file.is_ours():
                return True
            with self._changed:
                events = list(self._waiting)
                self._waiting.clear()
            self._file.write_events(events)
        except OSError as error:
            log.warning("the record of the run is not written any more", path=str(self._file.path), error=str(error))
            return False
        return True


def open_record(pod: TrainerPod, environ: Mapping[str, str]) -> LauncherRecord:
    """Open the record of a pod. Secrets of its environment are left out."""
    return LauncherRecord(RecordFile(pod), Redaction(environ))


def last_lines(lines: Sequence[str], most_bytes: int) -> tuple[str, ...]:
    """Return the last lines that fit, and at least the end of the last one."""
    shown: list[str] = []
    for line in reversed(lines[-MOST_LINES:]):
        most_bytes -= len(line.encode()) + 1
        if most_bytes < 0:
            break
        shown.append(line)
    if not shown and lines:
        shown = [lines[-1][-MOST_LINES:]]
    return tuple(reversed(shown))
