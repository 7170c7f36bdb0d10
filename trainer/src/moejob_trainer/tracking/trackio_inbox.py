"""The inbox of trackio in the run folder: lines of JSON that its dashboard takes up. No package is needed to write it.

A fragment is a file of lines that is never changed: `trackio show` imports it into its database and removes it. So the
lines of the present fragment have another name, and get their own after ten seconds. What a killed start leaves behind
is finished by the next one.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from moejob_api.job.lifecycle import Trackio
from moejob_trainer.runtime.disk import Disk
from moejob_trainer.tracking.backends import StepNumbers, TrackedRun

# `TRACKIO_DIR` of who looks at the run.
FOLDER, _INBOX = "trackio", "inbox"
_OPEN_NAME, _SUFFIX = "fragment.open", ".jsonl"
_FRAGMENT_SECONDS = 10.0
_VERSION = 1


class TrackioInbox:
    """The fragments of one start of the ranks, in a folder of their own."""

    def __init__(self, run: TrackedRun, trackio: Trackio, clock: Callable[[], float] = time.monotonic) -> None:
        self._run, self._project, self._clock = run, trackio.project, clock
        inbox = run.folder / FOLDER / _INBOX
        self._folder = inbox / f"{run.uid}-{run.token.attempt}-{run.token.restart}"
        self._count, self._began_at, self._is_empty = 0, clock(), True
        self._spec: Any = run.describe_spec()
        for left_over in sorted(inbox.glob(f"{run.uid}-*/{_OPEN_NAME}")):
            _finish_fragment(left_over, left_over.with_name(f"left-over{_SUFFIX}"))

    def write(self, numbers: StepNumbers) -> None:
        """Add the line of a step."""
        # A dashboard that took up all fragments has removed the empty folder.
        self._folder.mkdir(parents=True, exist_ok=True)
        Disk().append(self._folder / _OPEN_NAME, (json.dumps(self._step_record(numbers)) + "\n").encode())
        self._is_empty = False
        if not self._count or self._clock() - self._began_at >= _FRAGMENT_SECONDS:
            self._finish_open_fragment()

    def close(self, *, has_failed: bool) -> None:  # noqa: ARG002 trackio has no field for it
        """Finish the last fragment."""
        self._finish_open_fragment()

    def _finish_open_fragment(self) -> None:
        target = self._folder / f"{self._count:08d}{_SUFFIX}"
        with suppress(FileNotFoundError):
            _finish_fragment(self._folder / _OPEN_NAME, target)
        self._count, self._began_at, self._is_empty = self._count + 1, self._clock(), True

    def _step_record(self, numbers: StepNumbers) -> dict[str, Any]:
        return {
            "v": _VERSION,
            "kind": "metric",
            "project": self._project,
            "run": self._run.job,
            "run_id": self._run.uid,
            "metrics": numbers.values,
            "step": numbers.step,
            "timestamp": datetime.fromtimestamp(numbers.time, UTC).isoformat(),
            # Fragments are imported in any order, and by several dashboards: each begins with the job.
            "config": self._spec if self._is_empty else None,
            # Of equal ids trackio keeps the first: a step that comes again after a restart is no second point.
            "log_id": uuid.uuid5(uuid.NAMESPACE_OID, f"{self._run.uid}/{numbers.step}").hex,
        }


def _finish_fragment(lines: Path, fragment: Path) -> None:
    # The dashboard may belong to another user.
    lines.chmod(0o644)
    Disk().rename(lines, fragment)
