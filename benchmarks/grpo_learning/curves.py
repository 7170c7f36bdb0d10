"""The picture and the table of learning curves, a line for each seed of a model on a task. Reads results alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from statistics import mean, median
from typing import Any

from benchmarks.record import write_page

_BENCHMARKS = Path(__file__).parents[1]
RESULTS = _BENCHMARKS / "results" / "grpo-learning.jsonl"
PICTURE = _BENCHMARKS.parent / "docs" / "pictures" / "grpo-learning.svg"

_WIDTH, _HEIGHT, _LEFT, _TOP, _GAP = 520, 240, 56, 46, 40
_COLOURS = ("#0b69a3", "#b44d12", "#207227", "#8719e0", "#a61b1b")
# Steps that a point of a curve is the mean of: answers of one step are few.
_SMOOTHED = 5


@dataclass(frozen=True, slots=True)
class Panel:
    """The curves of one model on one task."""

    title: str
    curves: Mapping[int, Sequence[float]]

    @property
    def steps(self) -> int:
        """Return the steps of the longest curve."""
        return max(len(curve) for curve in self.curves.values())

    @property
    def highest(self) -> float:
        """Return the top of the scale: a reward of 1 unless there is more."""
        return max(1.0, *(value for curve in self.curves.values() for value in curve))


def draw_curves(results: Path = RESULTS, picture: Path = PICTURE) -> bool:
    """Draw all results; return whether there are any."""
    panels = panels_of(read_lines(results))
    if panels:
        picture.parent.mkdir(parents=True, exist_ok=True)
        picture.write_text(picture_of(panels), encoding="utf-8")
    return bool(panels)


def write_table(results: Path = RESULTS) -> None:
    """Write the picture and the table of all results into the benchmark's page."""
    lines = read_lines(results)
    if lines:
        write_page("grpo-learning", f"![Reward by step](../docs/pictures/{PICTURE.name})\n\n{table_of(lines)}")


def read_lines(results: Path) -> list[Mapping[str, Any]]:
    """Return the newest line of each seed of a model and task on a device; none that has no step."""
    text = results.read_text(encoding="utf-8") if results.exists() else ""
    newest = {(_title(line), line["seed"]): line for line in map(json.loads, text.splitlines()) if line["reward"]}
    return [newest[key] for key in sorted(newest)]


def panels_of(lines: Sequence[Mapping[str, Any]]) -> list[Panel]:
    """Return a panel for each model, task and device."""
    curves: dict[str, dict[int, Sequence[float]]] = {}
    for line in lines:
        curves.setdefault(_title(line), {})[line["seed"]] = smooth(line["reward"])
    return [Panel(title, of_seeds) for title, of_seeds in curves.items()]


def table_of(lines: Sequence[Mapping[str, Any]]) -> str:
    """Return a row for each seed: rewards at both ends, how near engine and trainer were, and where the time went."""
    columns = ["run", "seed", "steps", *_COLUMNS]
    rows = [f"| {' | '.join(columns)} |", f"|---{'|---:' * (len(columns) - 1)}|"]
    for line in lines:
        cells = [_title(line), f"{line['seed']}", f"{line['steps']} of {line['stepsAsked']}"]
        cells += [_value_text(choose(line[name])) if line[name] else "" for name, choose in _COLUMNS.values()]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join([*rows, "", f"Measured with {lines[-1]['stack']}, commit {lines[-1]['commit']}."])


def _first_steps(values: Sequence[float]) -> float:
    return mean(values[:_SMOOTHED])


def _last_steps(values: Sequence[float]) -> float:
    return mean(values[-_SMOOTHED:])


def _value_text(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


# Of a column: the series, and the number that is shown of it.
_COLUMNS: Mapping[str, tuple[str, Callable[[Sequence[float]], float]]] = {
    "reward of the first 5": ("reward", _first_steps),
    "of the last 5": ("reward", _last_steps),
    "mismatch, most of a step's means": ("mismatchMean", max),
    "probe, most of the means": ("probeMean", max),
    "generated tokens/s": ("generationTokensPerSecond", median),
    "trained tokens/s": ("trainingTokensPerSecond", median),
    "s of a step": ("seconds", median),
    "publishing": ("syncSeconds", median),
    "answers": ("generateSeconds", median),
    "sleep": ("releaseSeconds", median),
    "log-probabilities": ("outputsSeconds", median),
    "updates": ("learnSeconds", median),
}


def smooth(values: Sequence[float], width: int = _SMOOTHED) -> list[float]:
    """Return the mean of each value and those before it, `width` at most."""
    parts = (values[max(0, end - width) : end] for end in range(1, len(values) + 1))
    return [sum(part) / len(part) for part in parts]


def picture_of(panels: Sequence[Panel]) -> str:
    """Return the panels below one another as SVG."""
    height = len(panels) * (_HEIGHT + _TOP + _GAP)
    drawn = "".join(
        f'<g transform="translate(0,{number * (_HEIGHT + _TOP + _GAP)})">{"".join(_panel(panel))}</g>'
        for number, panel in enumerate(panels)
    )
    width = _LEFT + _WIDTH + 110
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        'aria-label="Reward by step of GRPO, a line for each seed" '
        'font-family="ui-sans-serif, system-ui, sans-serif" font-size="13" fill="#1f2933">'
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>{drawn}</svg>\n'
    )


def _title(line: Mapping[str, Any]) -> str:
    return f"{line['model']}, {line['task']}, {line['dtype']}, temperature {line['temperature']}, {line['device']}"


def _panel(panel: Panel) -> Iterator[str]:
    yield f'<text x="{_LEFT}" y="24" font-weight="600">{escape(panel.title)}</text>'
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = _TOP + _HEIGHT * (1 - share)
        yield f'<path d="M{_LEFT},{y:.1f} h{_WIDTH}" stroke="#cbd2d9" fill="none"/>'
        yield f'<text x="{_LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{share * panel.highest:.2f}</text>'
    for number, (seed, curve) in enumerate(panel.curves.items()):
        colour = _COLOURS[number % len(_COLOURS)]
        yield f'<path d="{_path(curve, panel)}" stroke="{colour}" stroke-width="1.8" fill="none"/>'
        yield (
            f'<text x="{_LEFT + _WIDTH + 10}" y="{_TOP + 14 + 20 * number}" fill="{colour}">seed {seed}: '
            f"{curve[-1]:.2f}</text>"
        )
    yield f'<text x="{_LEFT}" y="{_TOP + _HEIGHT + 20}">step 1</text>'
    yield f'<text x="{_LEFT + _WIDTH}" y="{_TOP + _HEIGHT + 20}" text-anchor="end">{panel.steps}</text>'


def _path(curve: Sequence[float], panel: Panel) -> str:
    each = _WIDTH / max(1, panel.steps - 1)
    points = (
        f"{_LEFT + each * step:.1f},{_TOP + _HEIGHT * (1 - value / panel.highest):.1f}"
        for step, value in enumerate(curve)
    )
    return "M" + " L".join(points)
