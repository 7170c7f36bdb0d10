"""`moejob compare`: the fields in which jobs of runs differ, and how far apart their curves are.

Curves are those of the page: the last line of a step counts, so a step that was done again after a failure has one
value. Steps that only some of the runs have are left out of every comparison, or the longer run would look better.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moejob_cli.board.run_files import RunFiles

# Numbers of a step that people look at first, as on the page; -o json has all.
SHOWN_METRICS = (
    "loss",
    "reward",
    "evalLoss",
    "evalScore",
    "gradNorm",
    "learningRate",
    "tokensPerSecondPerGpu",
    "seconds",
    "peakMemoryBytes",
    "expertImbalance",
    "routerEntropy",
    "idleExperts",
    "entropy",
)
# Clocks and counters of a run, which are no curve of its training.
_UNCOMPARED = ("step", "time", "attempt", "restart")

Curve = dict[int, float]


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """A field of the job that not all runs have alike; None where a run lacks it."""

    path: str
    values: tuple[str | None, ...]


@dataclass(frozen=True, slots=True)
class CurveDifference:
    """A number of the step log in all runs, over the steps that all of them have.

    `[1, 2, 4]` and `[1, 3, 5]` first differ at step 2, where they are also farthest apart: by 1.
    """

    metric: str
    # At the last step that all runs have; None where a run lacks the number.
    step: int | None
    values: tuple[float | None, ...]
    first_difference_step: int | None
    farthest_step: int | None
    farthest: float | None


@dataclass(frozen=True, slots=True)
class RunComparison:
    """The differences between runs; the first tuple names the runs."""

    runs: tuple[str, ...]
    last_steps: tuple[int | None, ...]
    common_steps: int
    fields: tuple[FieldDifference, ...]
    # Runs that have not written their job yet.
    without_job: tuple[str, ...]
    curves: tuple[CurveDifference, ...]


def compare_runs(runs: Sequence[RunFiles], metrics: Sequence[str] | None = None) -> RunComparison:
    """Compare runs by the given numbers, or by all that any of them has."""
    for run in runs:
        run.columns.refresh()
    names = dict.fromkeys(name for run in runs for name in run.columns.names if name not in _UNCOMPARED)
    compared_metrics = [name for name in (names if metrics is None else metrics) if name in names]
    steps = [set(_read_curve(run, "step")) for run in runs]
    curves = [compare_curves(name, [_read_curve(run, name) for run in runs]) for name in compared_metrics]
    labels, jobs = _run_labels(runs), [run.job_fields() for run in runs]
    return RunComparison(
        tuple(labels),
        tuple(max(run_steps, default=None) for run_steps in steps),
        len(set.intersection(*steps)),
        compare_fields(jobs),
        tuple(label for label, job in zip(labels, jobs, strict=True) if not job),
        tuple(curves),
    )


def compare_fields(jobs: Sequence[dict[str, str]]) -> tuple[FieldDifference, ...]:
    """Return the fields in which jobs differ, by path. A job that is not written yet, and so empty, differs in none."""
    written = [job for job in jobs if job]
    paths = sorted({path for job in written for path in job})
    differing = (path for path in paths if len({job.get(path) for job in written}) > 1)
    return tuple(FieldDifference(path, tuple(job.get(path) for job in jobs)) for path in differing)


def compare_curves(metric: str, curves: Sequence[Curve]) -> CurveDifference:
    """Compare the values of one number, by step."""
    common_steps = sorted(set.intersection(*(set(curve) for curve in curves)))
    if not common_steps:
        last_values = tuple(curve[max(curve)] if curve else None for curve in curves)
        return CurveDifference(metric, None, last_values, None, None, None)
    spreads = {step: max(at := [curve[step] for curve in curves]) - min(at) for step in common_steps}
    differing_steps = [step for step in common_steps if spreads[step]]
    farthest_step = max(differing_steps, key=spreads.__getitem__, default=None)
    return CurveDifference(
        metric,
        common_steps[-1],
        tuple(curve[common_steps[-1]] for curve in curves),
        differing_steps[0] if differing_steps else None,
        farthest_step,
        None if farthest_step is None else spreads[farthest_step],
    )


def comparison_report(comparison: RunComparison) -> RenderableType:
    """Return the comparison for a person."""
    return Group(*_report_parts(comparison))


def comparison_document(comparison: RunComparison) -> dict[str, Any]:
    """Return the comparison for a program, by the names of the page and of the step log."""
    fields = {difference.path: list(difference.values) for difference in comparison.fields}
    curves = {
        curve.metric: {
            "step": curve.step,
            "values": list(curve.values),
            "firstDifferenceStep": curve.first_difference_step,
            "farthestStep": curve.farthest_step,
            "farthest": curve.farthest,
        }
        for curve in comparison.curves
    }
    head = {"runs": list(comparison.runs), "lastSteps": list(comparison.last_steps)}
    return {**head, "commonSteps": comparison.common_steps, "fields": fields, "curves": curves}


def _report_parts(comparison: RunComparison) -> Iterator[RenderableType]:
    count = len(comparison.fields)
    if comparison.without_job:
        yield Text(f"not written yet: the job of {', '.join(comparison.without_job)}")
    yield Text(f"{count} fields differ" if count > 1 else "1 field differs" if count else "no field differs")
    if comparison.fields:
        yield _plain_table(
            ["field", *comparison.runs],
            [[field.path, *("–" if value is None else value for value in field.values)] for field in comparison.fields],
        )
    yield Text("")
    if not comparison.common_steps:
        yield Text("no step has been done by all runs, so there are no curves to compare")
        return
    lasts = ", ".join(f"{name} {step}" for name, step in zip(comparison.runs, comparison.last_steps, strict=True))
    yield Text(f"{comparison.common_steps} steps are in all runs; the last steps: {lasts}")
    head = ["", "step", *comparison.runs, "first differs", "farthest apart"]
    yield _plain_table(head, [_curve_cells(curve) for curve in comparison.curves])


def _plain_table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """Return a table of texts of strangers, in which no bracket is markup."""
    table = Table(box=None, header_style="dim", pad_edge=False)
    for title in head:
        table.add_column(Text(title))
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _curve_cells(curve: CurveDifference) -> list[str]:
    values = [_number_text(value) for value in curve.values]
    if curve.step is None:
        return [curve.metric, "last", *values, "", ""]
    if curve.farthest is None:
        return [curve.metric, str(curve.step), *values, "equal", ""]
    farthest = f"{_number_text(curve.farthest)} at {curve.farthest_step}"
    return [curve.metric, str(curve.step), *values, f"at {curve.first_difference_step}", farthest]


def _read_curve(run: RunFiles, metric: str) -> Curve:
    """Return the values of a number by step, without steps that a later start took back."""
    curve: Curve = {}
    newest = -1
    for step, value in zip(run.columns.read_column("step"), run.columns.read_column(metric), strict=True):
        if not isfinite(step) or not isfinite(value):
            continue
        if step <= newest:
            curve = {earlier: kept for earlier, kept in curve.items() if earlier < step}
        newest = int(step)
        curve[newest] = value
    return curve


def _run_labels(runs: Sequence[RunFiles]) -> list[str]:
    """Return the names of the runs; their folders where two have one name."""
    names = [run.name for run in runs]
    return names if len(set(names)) == len(names) else [str(run.folder) for run in runs]


def _number_text(value: float | None) -> str:
    return "–" if value is None else f"{value:.6g}"
