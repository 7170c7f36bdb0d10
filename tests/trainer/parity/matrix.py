"""Prints what the cells of the matrices measured, as tables: `make matrix`, `make test-learning-vllm`. A pytest plugin.

A test reports its numbers by `record_property(MATRIX, Entry.as_json)`; a cell without numbers has failed.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import astuple, dataclass

import pytest

MATRIX = "matrix"
_SMALL = 0.01


@dataclass(frozen=True)
class Entry:
    """One cell: relative errors, or counts and shares, in the order in which the table's title names them."""

    table: str
    row: str
    column: str
    numbers: tuple[float, ...]

    @property
    def as_json(self) -> str:
        """As text: it comes from another process where several share the tests."""
        return json.dumps(astuple(self))

    @property
    def format_numbers(self) -> str:
        """The numbers: small ones to one digit."""
        return " ".join(f"{number:.0e}" if 0 < number < _SMALL else f"{number:.4g}" for number in self.numbers)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """The tables, behind everything else."""
    reports = [report for kind in ("passed", "failed") for report in terminalreporter.stats.get(kind, ())]
    entries = [
        Entry(*json.loads(as_json)) for report in reports for name, as_json in report.user_properties if name == MATRIX
    ]
    for table in dict.fromkeys(entry.table for entry in entries):
        terminalreporter.write_sep("-", table)
        for line in tabulate_entries([entry for entry in entries if entry.table == table]):
            terminalreporter.write_line(line)
    failed = [report.nodeid for report in terminalreporter.stats.get("failed", ())]
    terminalreporter.write_line(f"{len(entries)} cells hold, {len(failed)} tests failed")


def tabulate_entries(entries: Sequence[Entry]) -> Iterator[str]:
    """Rows and columns in the order in which they came."""
    found = {(entry.row, entry.column): entry.format_numbers for entry in entries}
    rows, columns = (list(dict.fromkeys(key[axis] for key in found)) for axis in (0, 1))
    table = [["", *columns], *([row, *(found.get((row, column), "") for column in columns)] for row in rows)]
    widths = [max(len(line[place]) for line in table) for place in range(len(columns) + 1)]
    for line in table:
        yield "  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip()
