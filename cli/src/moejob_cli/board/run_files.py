"""The files of a run folder as the page shows them. Reads only, and trusts nothing that it reads."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from math import isfinite
from pathlib import Path
from typing import Any

import yaml
from pydantic_core import from_json

from moejob_api.contract.pods import RunFile, escaped_lines
from moejob_api.contract.record import RecordEvent, RunEventKind, parse_attempt_folder, read_record_lines
from moejob_api.documents.reading import parse_spec
from moejob_api.layout.ranks import rank_place
from moejob_api.layout.sizes import derive_layout
from moejob_api.problems import InvalidSpec
from moejob_cli.board.expert_load import read_expert_load
from moejob_cli.board.ledger import RankStart, StepRow, build_ledger
from moejob_cli.board.step_columns import StepColumns, parse_lines

_SAMPLE_FILE = re.compile(r"(eval-)?step-([0-9]{1,12})\.jsonl")
# Bounds of what one request reads: an answer of a megabyte is cut, and says so.
_MOST_FILE_BYTES, MOST_TEXT, _MOST_SAMPLES, _MOST_FILES = 32 * 1024 * 1024, 20_000, 500, 5_000
_MOST_RECORD_BYTES, _MOST_RECORD_FILES = 5 * 1024 * 1024, 400
_MOST_EVENTS = 4_000
_MOST_RANKS = 1_024
_START_PARTS = ("endingSeconds", "importSeconds", "meetingSeconds", "joiningSeconds", "loadingSeconds")
_ROW_COLUMNS = ("step", "time", "seconds", "dataWaitSeconds", "checkpointStallSeconds", "evaluateSeconds")


@dataclass(slots=True)
class RunFiles:
    """One run folder."""

    folder: Path
    cache: Path
    columns: StepColumns = field(init=False)

    def __post_init__(self) -> None:
        self.columns = StepColumns(self.folder / RunFile.STEPS, self.cache)

    @property
    def name(self) -> str:
        """The name of the job, or of the folder where no owner is named."""
        owner = _read_json(self.folder / RunFile.OWNER)
        job = owner.get("job") if isinstance(owner, dict) else None
        return escaped_lines(job)[:253] if isinstance(job, str) and job else self.folder.resolve().name

    def summary(self) -> dict[str, Any]:
        """Return what the list of runs shows."""
        self.columns.refresh()
        steps = self.columns.read_column("step")
        return {
            "name": self.name,
            "folder": str(self.folder),
            "rows": self.columns.rows,
            "step": int(steps[-1]) if steps and isfinite(steps[-1]) else None,
            "metrics": [
                escaped_lines(name) for name in self.columns.names if name not in ("step", "attempt", "restart")
            ],
        }

    def details(self) -> dict[str, Any]:
        """Return the run without its curves and samples."""
        summary, events = self.summary(), list(self.read_events())
        spec = _read_json(self.folder / RunFile.SPEC)
        ledger = build_ledger(self._rank_starts(events))
        return {
            **summary,
            "job": _job_text(spec),
            "fields": self.job_fields(),
            "layout": _layout_rows(spec),
            "nodes": _node_rows(events),
            "events": [_event_row(attempt, event) for attempt, event in events[-_MOST_EVENTS:]],
            "ledger": {
                "totals": ledger.totals(),
                "pieces": [
                    {
                        "begin": piece.begin,
                        "end": piece.end,
                        "seconds": {k.value: v for k, v in piece.seconds.items() if v},
                    }
                    for piece in ledger.pieces
                ],
                "failures": [asdict(failure) for failure in ledger.failures],
            },
            "samples": self.sample_files(),
        }

    def job_fields(self) -> dict[str, str]:
        """Return the fields of the job by their paths: runs are compared by them."""
        return _flat_fields(_read_json(self.folder / RunFile.SPEC))

    def read_events(self) -> Iterator[tuple[int, RecordEvent]]:
        """Yield attempt and event of the whole record, by time."""
        events = []
        for path in sorted((self.folder / RunFile.RECORD).glob("attempt-*/*.jsonl"))[:_MOST_RECORD_FILES]:
            attempt = parse_attempt_folder(path.parent.name)
            if attempt is not None and not path.is_symlink():
                lines = _read_bytes(path, _MOST_RECORD_BYTES).splitlines()
                events += [(attempt, event) for event in read_record_lines(lines)]
        yield from sorted(events, key=lambda pair: pair[1].time)

    def _rank_starts(self, events: list[tuple[int, RecordEvent]]) -> list[RankStart]:
        """Return the starts of all ranks, with the rows of the step log that each wrote."""
        rows: dict[tuple[int, int], list[StepRow]] = {}
        columns = [self.columns.read_column(name) for name in _ROW_COLUMNS]
        parts = [self.columns.read_column(name) for name in _START_PARTS]
        attempts, restarts = self.columns.read_column("attempt"), self.columns.read_column("restart")
        for number, values in enumerate(zip(*columns, strict=True)):
            step, at, seconds, waited, stalled, evaluated = (value if isfinite(value) else 0.0 for value in values)
            key = (_whole_number(attempts[number]), _whole_number(restarts[number]))
            start_seconds = 0.0
            if key not in rows:
                start_seconds = sum(part[number] for part in parts if isfinite(part[number]))
            rows.setdefault(key, []).append(StepRow(int(step), at, seconds, waited, stalled, evaluated, start_seconds))
        by_start: dict[tuple[int, int], list[RecordEvent]] = {}
        for attempt, event in events:
            if event.kind is not RunEventKind.DECISION:
                by_start.setdefault((attempt, event.restart or 0), []).append(event)
        keys = sorted({*rows, *by_start})
        return [RankStart(*key, rows.get(key, ()), by_start.get(key, ())) for key in keys]

    def read_experts(self) -> dict[str, Any]:
        """Return the load of experts by step."""
        return read_expert_load(_read_bytes(self.folder / RunFile.EXPERTS, _MOST_FILE_BYTES).splitlines())

    def sample_files(self) -> list[str]:
        """Return the names of files of samples, by step."""
        try:
            names = [path.name for path in (self.folder / "samples").iterdir() if _SAMPLE_FILE.fullmatch(path.name)]
        except OSError:
            return []
        return sorted(names, key=lambda name: (_step_of_file(name), name))[-_MOST_FILES:]

    def read_samples(self, name: str) -> list[dict[str, Any]]:
        """Return the samples of a file; none for any other name."""
        path = self.folder / "samples" / name
        if not _SAMPLE_FILE.fullmatch(name) or path.is_symlink():
            return []
        lines = _read_bytes(path, _MOST_FILE_BYTES).splitlines()[:_MOST_SAMPLES]
        return [_sample_row(row) for row in parse_lines(lines)]


def _step_of_file(name: str) -> int:
    name_match = _SAMPLE_FILE.fullmatch(name)
    return int(name_match[2]) if name_match else 0


def shown_text(value: Any, most: int = MOST_TEXT) -> str:
    """Return a text of a stranger, cut, and with what a terminal would obey escaped."""
    text = value if isinstance(value, str) else str(value)
    shown = escaped_lines(text[:most])
    return shown if len(text) <= most else f"{shown} … ({len(text) - most:,} more characters in the file)"


def _sample_row(row: Mapping[str, Any]) -> dict[str, Any]:
    fields: dict[str, Any] = {}
    for name, value in list(row.items())[:40]:
        label = shown_text(name, 100)
        if isinstance(value, bool | int | float) or value is None:
            fields[label] = value if not isinstance(value, float) or isfinite(value) else None
        elif isinstance(value, dict):
            fields[label] = {shown_text(k, 100): shown_text(v, 200) for k, v in list(value.items())[:40]}
        else:
            fields[label] = shown_text(value)
    return fields


def _event_row(attempt: int, event: RecordEvent) -> dict[str, Any]:
    fields: dict[str, Any] = event.model_dump(mode="json", by_alias=True, exclude_defaults=True)
    return {**fields, "attempt": attempt}


def _job_text(spec: Any) -> str:
    return shown_text(yaml.safe_dump(spec, sort_keys=False, allow_unicode=True), 200_000) if spec is not None else ""


def _flat_fields(value: Any, path: str = "") -> dict[str, str]:
    """Return the leaves of a spec by their paths."""
    if isinstance(value, dict) and value:
        parts = [_flat_fields(part, f"{path}.{name}" if path else str(name)) for name, part in value.items()]
    elif isinstance(value, list) and value:
        parts = [_flat_fields(part, f"{path}[{number}]") for number, part in enumerate(value)]
    else:
        # Not Python's words but those of the YAML that a job is written in.
        text = value if isinstance(value, str) else json.dumps(value)
        return {shown_text(path, 300): shown_text(text, 2_000)} if path else {}
    return {name: leaf for part in parts for name, leaf in part.items()}


def _layout_rows(spec: Any) -> list[dict[str, int]]:
    try:
        parsed = parse_spec(spec)
        layout = derive_layout(parsed.parallelism, parsed.resources.gpus_per_node)
        return [asdict(rank_place(layout, rank)) for rank in range(min(layout.gpus, _MOST_RANKS))]
    except (InvalidSpec, ValueError, TypeError, AttributeError):
        return []


def _node_rows(events: list[tuple[int, RecordEvent]]) -> list[dict[str, Any]]:
    """Return the newest place of each pod."""
    places = {
        event.pod: {
            "pod": event.pod,
            "node": event.node,
            "host": event.host,
            "ranks": list(event.ranks),
            "attempt": attempt,
        }
        for attempt, event in events
        if event.kind is RunEventKind.LAUNCHER_STARTED
    }
    return [places[pod] for pod in sorted(places, key=lambda pod: pod or 0)]


def _read_json(path: Path) -> Any:
    try:
        return from_json(_read_bytes(path, _MOST_FILE_BYTES))
    except ValueError:
        return None


def _read_bytes(path: Path, most: int) -> bytes:
    try:
        # A pipe in place of a file would wait for a writer.
        if not path.is_file():
            return b""
        with path.open("rb") as file:
            return file.read(most)
    except OSError:
        return b""


def _whole_number(value: float) -> int:
    return int(value) if isfinite(value) else 0
