"""The report of a run as one file: the page, with curves thinned and samples bounded."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Sequence
from math import isfinite
from typing import Any

from moejob_cli.board.page import build_page
from moejob_cli.board.run_files import RunFiles

# Points of a curve in a file: two for each pixel of a wide screen.
MOST_POINTS = 4_000
_MOST_SAMPLE_FILES = 40


def build_report(runs: Sequence[RunFiles]) -> str:
    """Return the page with all data of the runs."""
    return build_page({"runs": [_run_data(run) for run in runs]})


def _run_data(run: RunFiles) -> dict[str, Any]:
    details = run.details()
    names = _spread(details["samples"], _MOST_SAMPLE_FILES)
    steps = run.columns.read_column("step")
    curves = {name: _curve_data(steps, run.columns.read_column(name)) for name in details["metrics"]}
    return {
        **details,
        "experts": run.read_experts(),
        "samples": names,
        "sampleRows": {name: run.read_samples(name) for name in names},
        "curves": curves,
    }


def _curve_data(steps: array[float], values: array[float]) -> list[str]:
    kept = thin_curve(values, MOST_POINTS)
    return [
        base64.b64encode(array("d", (column[row] for row in kept)).tobytes()).decode() for column in (steps, values)
    ]


def thin_curve(values: Sequence[float], most_points: int) -> list[int]:
    """Return the rows of a curve to draw: the least and the greatest of each of equally long parts.

    So every value that is shown is one of the step log, and no spike is lost. [1, 5, 2, 3] in one part is rows 0 and 1.
    """
    rows = [row for row, value in enumerate(values) if isfinite(value)]
    if len(rows) <= most_points:
        return rows
    parts = max(1, most_points // 2)
    kept: set[int] = set()
    for part in range(parts):
        members = rows[part * len(rows) // parts : (part + 1) * len(rows) // parts]
        kept |= {min(members, key=values.__getitem__), max(members, key=values.__getitem__)}
    return sorted({*kept, rows[0], rows[-1]})


def _spread(names: Sequence[str], most: int) -> list[str]:
    """Return names that are spread over all of them, the last one among them."""
    if len(names) <= most:
        return list(names)
    return [names[-1 - number * (len(names) - 1) // (most - 1)] for number in reversed(range(most))]
