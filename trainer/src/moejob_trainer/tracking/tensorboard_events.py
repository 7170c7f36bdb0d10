"""TensorBoard's event files in the run folder. Synchronous: the thread it runs in is its queue."""

from __future__ import annotations

import json
from typing import Any

from tensorboardX.event_file_writer import EventsWriter
from tensorboardX.proto.event_pb2 import Event, SessionLog
from tensorboardX.proto.summary_pb2 import Summary
from tensorboardX.summary import text

from moejob_trainer.tracking.backends import StepNumbers, TrackedRun

FOLDER = "tensorboard"


class TensorBoardEvents:
    """One file for each start of the ranks; its session log hides the later steps that an earlier start wrote."""

    def __init__(self, run: TrackedRun) -> None:
        self._run = run
        self._writer: Any = None

    def write(self, numbers: StepNumbers) -> None:
        """Write one event and flush it."""
        if self._writer is None:
            self._writer = self._open_writer(numbers)
        values = [Summary.Value(tag=name, simple_value=value) for name, value in numbers.values.items()]
        self._write_event(numbers, summary=Summary(value=values))
        self._writer.flush()

    def close(self, *, has_failed: bool) -> None:  # noqa: ARG002 event files have no field for it
        """Close the file."""
        if self._writer is not None:
            self._writer.close()

    def _open_writer(self, first: StepNumbers) -> Any:
        folder, token = self._run.folder / FOLDER, self._run.token
        folder.mkdir(exist_ok=True)
        # Two starts within a second would write the same file.
        self._writer = EventsWriter(str(folder / "events"), f".{token.attempt}.{token.restart}")
        self._write_event(first, session_log=SessionLog(status=SessionLog.START))
        spec = json.dumps(self._run.describe_spec(), indent=2)
        self._write_event(first, summary=text(self._run.job, f"```\n{spec}\n```"))
        return self._writer

    def _write_event(self, numbers: StepNumbers, **event_fields: Any) -> None:
        self._writer.write_event(Event(wall_time=numbers.time, step=numbers.step, **event_fields))
