"""The record of a run: the lines that launchers leave in the run folder, so that a report outlives every pod.

`record/attempt-0000000002/pod-00000.jsonl` has the events of one pod in one attempt, a JSON line each. Only that pod's
launcher writes it. `moejob run` adds its decisions in `supervisor.jsonl` of the same folder. Lines are read long after
their writer, so unknown fields are ignored, and a line that cannot be read is left out.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from enum import StrEnum
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from moejob_api.contract.pods import PrintableText

SUPERVISOR_FILE = "supervisor.jsonl"
_ATTEMPT_FOLDER = re.compile(r"attempt-([0-9]{10})")
# Lines of a rank that one event keeps, and their bytes: a longer output is cut at its beginning.
MOST_LINES, MOST_LINES_BYTES = 400, 32 * 1024


class RunEventKind(StrEnum):
    """Events of a record, in the order in which they mostly occur."""

    # A launcher has begun. The event names the node and the ranks of the pod.
    LAUNCHER_STARTED = "LauncherStarted"
    # The ranks of all pods start; `seconds` has the parts of the time before.
    RANKS_STARTED = "RanksStarted"
    # The slowest rank of the pod of rank 0 has entered a phase.
    PHASE = "Phase"
    # A pod was asked to stop.
    STOP_REQUESTED = "StopRequested"
    # Ranks of this pod can no longer run.
    RANKS_FAILED = "RanksFailed"
    # Another pod has ended the round.
    ROUND_ENDED = "RoundEnded"
    # The last lines of a rank: its traceback, or its stacks if it was silent.
    LAST_LINES = "LastLines"
    # All ranks start again, in place.
    RESTARTING = "Restarting"
    # The launcher leaves; no later line of this process follows.
    LAUNCHER_ENDED = "LauncherEnded"
    # `moejob run` has decided how the run continues.
    DECISION = "Decision"
    # The file is full: from here on it has only events without lines.
    FULL = "Full"


class RecordEvent(BaseModel):
    """One line of a record. Fields beyond the first four have a meaning for some events only."""

    model_config = ConfigDict(alias_generator=to_camel, validate_by_name=True, extra="ignore", frozen=True)

    # Seconds since 1970.
    time: Annotated[float, Field(ge=0, le=1e11, allow_inf_nan=False)]
    kind: RunEventKind
    pod: int | None = None
    restart: int | None = None
    message: PrintableText = ""
    node: PrintableText | None = None
    host: PrintableText | None = None
    ranks: tuple[int, ...] = ()
    # A phase, a cause of failure or an outcome.
    state: PrintableText | None = None
    rank: int | None = None
    exit_code: int | None = None
    step: int | None = None
    seconds: dict[str, float] = {}
    lines: tuple[PrintableText, ...] = ()
    # Characters in front of `lines` that were cut.
    cut: int = 0


def attempt_folder_name(attempt: int) -> str:
    """The folder of an attempt below `record`. Zero-padded, so that names order as numbers do."""
    return f"attempt-{attempt:010d}"


def parse_attempt_folder(name: str) -> int | None:
    """The attempt of a folder below `record`; None for any other name."""
    name_match = _ATTEMPT_FOLDER.fullmatch(name)
    return None if name_match is None else int(name_match[1])


def pod_record_name(pod: int) -> str:
    """The file of a pod in the folder of its attempt."""
    return f"pod-{pod:05d}.jsonl"


def record_line(event: RecordEvent) -> str:
    """The event as a line of a record."""
    return event.model_dump_json(by_alias=True, exclude_defaults=True) + "\n"


def read_record_lines(lines: Iterable[bytes]) -> Iterator[RecordEvent]:
    """Yield the events of a record. A damaged line is left out: the others still explain the run."""
    for line in lines:
        try:
            yield RecordEvent.model_validate_json(line)
        except ValidationError:
            continue
