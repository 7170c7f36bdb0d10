"""The display of a run, while it runs and when it has ended: a bar in a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from moejob_api.contract.pods import RunFile, escaped_lines
from moejob_api.job.grpo import Grpo
from moejob_api.learning_signals import signal_words, weak_signals
from moejob_cli.running.steps import StepLine, seconds_left, tokens_per_second
from moejob_cli.sparklines import draw_sparkline

_LINE_SECONDS = 5.0
_PHASE_LINE_SECONDS = 10.0
_CURVE_WIDTH = 60
_BAR_WIDTH = 40


@dataclass(frozen=True, slots=True)
class RunView:
    """A run at one moment."""

    phase: str
    lines: Sequence[StepLine]
    total_steps: int | None
    checkpoint_step: int | None
    restarts: int
    # The phase of ranks before the first step and after the last one, its duration so far and its percentage.
    doing: str | None = None
    doing_seconds: float = 0.0
    doing_percentage: int | None = None

    @property
    def step(self) -> int:
        """Steps done."""
        return self.lines[-1].step if self.lines else 0


class RunDisplay(Protocol):
    """A display of a run."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def show_view(self, view: RunView) -> None:
        """Show the present view of the run."""

    def report_event(self, event: str) -> None:
        """Print an event, which stays on the screen."""


def choose_display() -> RunDisplay:
    """Return the display that fits the output: a terminal or not."""
    return TerminalDisplay(Console(highlight=False)) if sys.stdout.isatty() else PlainDisplay()


class TerminalDisplay:
    """A bar that moves."""

    def __init__(self, console: Console) -> None:
        # The thread that shows a view draws it: a thread of rich would be running while launchers are forked.
        self._live = Live(console=console, auto_refresh=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def show_view(self, view: RunView) -> None:
        """Draw the run again."""
        self._live.update(draw_view(view), refresh=True)

    def report_event(self, event: str) -> None:
        """Print above the bar."""
        self._live.console.print(Text(escaped_lines(event), style="yellow"))


class PlainDisplay:
    """A line every few seconds, and one for each event."""

    def __init__(self) -> None:
        self._shown_view: RunView | None = None
        self._shown_at = 0.0

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Do nothing: plain lines change no state of the output."""

    def show_view(self, view: RunView) -> None:
        """Print when there is something new, and not too often."""
        if is_news(view, self._shown_view, time.monotonic() - self._shown_at):
            self._shown_view, self._shown_at = freeze_view(view), time.monotonic()
            sys.stdout.write(plain_line(view) + "\n")
            sys.stdout.flush()

    def report_event(self, event: str) -> None:
        """Print."""
        sys.stdout.write(escaped_lines(event) + "\n")
        sys.stdout.flush()


def freeze_view(view: RunView) -> RunView:
    """Return the view with a copy of its newest line, for the run keeps adding to the list."""
    return replace(view, lines=tuple(view.lines[-1:]))


def is_news(view: RunView, shown: RunView | None, seconds_ago: float) -> bool:
    """Return whether a line is due: another phase, another checkpoint, the last step; the rest now and then."""
    if shown is None or _news_fields(view) != _news_fields(shown):
        return True
    if view.step == shown.step:
        return view.doing is not None and seconds_ago >= _PHASE_LINE_SECONDS
    return view.step == view.total_steps or seconds_ago >= _LINE_SECONDS


def _news_fields(view: RunView) -> tuple[str, str | None, int | None]:
    return view.phase, view.doing, view.checkpoint_step


def plain_line(view: RunView) -> str:
    """The run in one line."""
    return f"{view.phase}: {', '.join(_view_words(view))}"


def draw_view(view: RunView) -> RenderableType:
    """The run as a bar with its numbers."""
    grid = Table.grid(padding=(0, 2))
    grid.add_row(
        Text(view.phase, style="bold"),
        _draw_bar(view),
        Text(_step_words(view) if view.doing_percentage is None else f"{view.doing_percentage} %"),
    )
    return Group(grid, Text("  ".join(_view_words(view)[1:]), style="dim"))


def _draw_bar(view: RunView) -> ProgressBar:
    if view.doing_percentage is not None:
        return ProgressBar(total=100, completed=view.doing_percentage, width=_BAR_WIDTH)
    return ProgressBar(total=view.total_steps or 1, completed=view.step, width=_BAR_WIDTH)


def closing_lines(lines: Sequence[StepLine], folder: Path, grpo: Grpo | None = None) -> RenderableType:
    """Return the closing lines of a run: the curve of loss or reward, signs of little learned, the places of files."""
    signals = weak_signals(lines, grpo) if grpo else []
    notes = [Text(f"  note         {signal.message}", style="yellow") for signal in signals]
    return Group(*_curve_lines(lines), *notes, *_file_lines(folder))


def _step_words(view: RunView) -> str:
    return f"step {view.step}/{view.total_steps}" if view.total_steps else f"step {view.step}"


def _view_words(view: RunView) -> list[str]:
    words = [_step_words(view)]
    if view.doing is not None:
        share = "" if view.doing_percentage is None else f" {view.doing_percentage} %"
        duration = f" for {duration_words(view.doing_seconds)}" if view.doing_seconds >= 1 else ""
        words.append(f"{view.doing}{share}{duration}")
    if view.lines:
        words += [_score_words(view.lines[-1]), *signal_words(view.lines[-1])]
    speed, remaining_seconds = tokens_per_second(view.lines), seconds_left(view.lines, view.total_steps)
    if speed is not None:
        words.append(f"{speed:,.0f} tokens/s")
    if remaining_seconds:
        words.append(f"{duration_words(remaining_seconds)} left")
    if view.checkpoint_step is not None:
        words.append(f"checkpoint {view.checkpoint_step}")
    if view.restarts:
        words.append(f"{view.restarts} restart{'s' if view.restarts > 1 else ''}")
    return words


def _score_words(line: StepLine) -> str:
    return f"loss {line.loss:.4f}" if line.reward is None else f"reward {line.reward:.4f}"


def duration_words(seconds: float) -> str:
    """Return a duration in words: 59 s, 3 min 5 s, 2 h 10 min."""
    whole_seconds = round(seconds)
    if whole_seconds < 60:
        return f"{whole_seconds} s"
    if whole_seconds < 3600:
        return f"{whole_seconds // 60} min {whole_seconds % 60} s"
    return f"{whole_seconds // 3600} h {whole_seconds % 3600 // 60} min"


def _curve_lines(lines: Sequence[StepLine]) -> list[RenderableType]:
    if not lines:
        return []
    rewards = [line.reward for line in lines if line.reward is not None]
    name, values = ("reward", rewards) if rewards else ("loss", [line.loss for line in lines])
    curve_lines = [Text(f"  {name:12} {values[0]:.4f} {draw_sparkline(values, _CURVE_WIDTH)} {values[-1]:.4f}")]
    evaluated = [line.eval_loss for line in lines if line.eval_loss is not None]
    if evaluated:
        curve_lines.append(Text(f"  evaluation   {evaluated[0]:.4f} to {evaluated[-1]:.4f}"))
    best = [line for line in lines if line.best_step is not None and line.best_score is not None]
    if best:
        curve_lines.append(Text(f"  best         {best[-1].best_score:.4f} at step {best[-1].best_step}"))
    if lines[-1].stopped_early:
        curve_lines.append(Text(f"  stopped      early at step {lines[-1].step}: training.earlyStop"))
    return [*curve_lines]


def _file_lines(folder: Path) -> list[RenderableType]:
    named_files = {
        "checkpoints": RunFile.CHECKPOINTS,
        "export": RunFile.EXPORT,
        "for Megatron": RunFile.EXPORT_MEGATRON,
        "logs": RunFile.LOGS,
        "steps": RunFile.STEPS,
    }
    return [Text(f"  {name:12} {folder / file}") for name, file in named_files.items() if (folder / file).exists()]
