"""Trainer and engines side by side, as a person reads them. Decides nothing and prints nothing."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from moejob_api.planner.rollout_plan import RolloutPlan


def rollout_report(rollout: RolloutPlan) -> RenderableType:
    """Return a row for each staleness that is compared, and the advice."""
    head = Text(
        f"  a step with answers of {rollout.mean_tokens:,} tokens on average and {rollout.longest_tokens:,} at most",
        style="bold",
    )
    return Group(head, Padding(_staleness_table(rollout), (0, 0, 0, 2)), *_advice_lines(rollout))


def _staleness_table(rollout: RolloutPlan) -> Table:
    columns = ("staleness", "step", "publication", "learning", "trainer waits", "engines wait")
    table = Table(*columns, box=None, header_style="dim", pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for step in rollout.compared:
        is_current = step.staleness == rollout.current.staleness
        table.add_row(
            f"{step.staleness}{', this job' if is_current else ''}",
            f"{step.seconds:,.1f} s",
            f"{step.sync:,.1f} s",
            f"{step.learning:,.1f} s",
            f"{step.trainer_idle_share:.0%}",
            f"{step.engine_idle_share:.0%}",
            style="bold" if is_current else "",
        )
    return table


def _advice_lines(rollout: RolloutPlan) -> Iterator[Text]:
    for sentence in rollout.advice:
        yield Text(f"  {sentence}")
