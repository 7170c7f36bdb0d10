"""The output of kubectl about jobs, as files to be reviewed; all that differs from run to run is replaced by its name.

`MOEJOB_GOLDEN=write` writes the files again instead of comparing.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

FOLDER = Path(__file__).parent / "golden"
WRITES = os.environ.get("MOEJOB_GOLDEN") == "write"

_COLUMN = re.compile(r"\S+(?: \S+)*")
_FIELD = re.compile(r"(?P<key> *(?P<name>[A-Z][\w ]*): +)(?P<value>\S.*)")
_UID = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}")
_STEPS = re.compile(r"(?P<step>\d+)(?P<rest>/(?P<total>\d+))?")
_MOVING = {"AGE", "Age", "SCORE", "EVAL", "EVAL LOSS", "SPEED", "ETA"}
_MOVING_FIELDS = {
    *("Creation Timestamp", "Start Time", "Completion Time", "Last Transition Time", "Updated At", "Time", "Since"),
    *("UID", "Resource Version", "Epoch", "Loss", "Score", "Speed", "Eta", "Save Seconds", "Tokens Per Second Per Gpu"),
    *("Best Score", "Eval Score", "Eval Loss"),
    *("Productive Seconds", "Lost Seconds", "Starting Seconds", "Suspended Seconds", "Lost Gpu Hours"),
    *("Last Checkpoint Step", "Checkpoint Step", "Node"),
    # Follows the planner's formulas: tests/operator/status holds it against their answer.
    "Memory Per Gpu Bytes",
}
_SAVED = re.compile(r"step \d+ is saved")
# Whether a claim is bound before its job's pods are reconciled is a race without a right winner. So is which steps a
# poll meets: the router of the tiny model collapses for some steps and recovers.
_SOMETIMES = re.compile(r"\b(ClaimPending|RouterCollapsed|RouterRecovered|NothingLearned|LearningAgain)\b")
_ROUTER = re.compile(
    r"    Last Transition Time:[^\n]*\n"
    r"(?:    (?!Last Transition)[^\n]*\n)*?    Type: +(?:RouterCollapsed|NothingLearned)\n"
)


def normalise_table(text: str) -> str:
    """A table of kubectl: its columns as wide as what is left in them."""
    head, *lines = text.splitlines()
    begins = [match.start() for match in _COLUMN.finditer(head)]
    names = _split_cells(head, begins)
    rows = [
        [_mask_cell(name, cell) for name, cell in zip(names, _split_cells(line, begins), strict=True)] for line in lines
    ]
    widths = [max(map(len, column)) for column in zip(names, *rows, strict=True)]
    return "\n".join(_align_row(row, widths) for row in (names, *rows))


def normalise_description(text: str) -> str:
    """Return what `kubectl describe` says, its events included."""
    fields, _, events = _ROUTER.sub("", text).partition("Events:\n")
    total = re.search(r"Total Steps: +(\d+)", fields)
    lines = [_mask_field(line, total[1] if total else "") for line in fields.splitlines()]
    if not events:
        return "\n".join(lines)
    # Indented, with a rule of dashes under the head.
    head, _, *rows = (line[2:] for line in events.splitlines() if not _SOMETIMES.search(line))
    return "\n".join([*lines, "Events:", normalise_table("\n".join([head, *rows]))])


def compare_with_file(name: str, sections: Sequence[tuple[str, str]], namespace: str = "") -> tuple[str, str]:
    """Return what is shown and what the file says, which is the same when files are written."""
    shown = "\n\n".join(f"$ kubectl {command}\n{output.rstrip()}" for command, output in sections) + "\n"
    shown = re.sub(r"[ \t]+$", "", _UID.sub("<uid>", shown), flags=re.MULTILINE)
    shown = shown.replace(namespace, "<namespace>") if namespace else shown
    file = FOLDER / f"{name}.txt"
    if WRITES:
        FOLDER.mkdir(exist_ok=True)
        file.write_text(shown)
    return shown, file.read_text()


def _split_cells(line: str, begins: Sequence[int]) -> list[str]:
    ends = [*begins[1:], len(line)]
    return [line[begin : max(begin, end)].strip() for begin, end in zip(begins, ends, strict=True)]


def _mask_cell(column: str, value: str) -> str:
    if column == "STEP":
        return _mask_steps(value)
    return f"<{column.lower()}>" if value and column in _MOVING else value


def _mask_steps(value: str) -> str:
    """Of a run that has ended by itself, the step is the same each time."""
    match = _STEPS.fullmatch(value)
    if match is None or match["step"] == match["total"]:
        return value
    return f"<n>{match['rest'] or ''}"


def _align_row(row: Sequence[str], widths: Sequence[int]) -> str:
    return "   ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()


def _mask_field(line: str, total: str) -> str:
    match = _FIELD.fullmatch(line)
    if match is None:
        return line
    name, value = match["name"], match["value"]
    if name == "Step" and value != total:
        return f"{match['key']}{_mask_steps(value)}"
    if name in _MOVING_FIELDS and value != "0":
        return f"{match['key']}<{name.lower()}>"
    return f"{match['key']}{_SAVED.sub('step <n> is saved', value)}"
