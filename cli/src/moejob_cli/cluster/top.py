"""One screen about one job: step, time left, speed, memory, use of its GPUs, and where the time of a step goes.

What the run measures comes from the step log by a running pod, the rest from the job itself.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import typer

from moejob_api.contract.texts import escaped_text
from moejob_api.job.phase import Phase
from moejob_cli.exits import CommandExit
from moejob_cli.sparklines import draw_sparkline
from moejob_client.job_view import JobView
from moejob_client.jobs import AsyncClient

_STEPS = 60
_HOME_AND_CLEAR = "\x1b[H\x1b[2J"
_GIB = 1024**3
# Sums of such numbers overflow.
_BEYOND_SENSE = 1e300
_WAITS = {"dataWaitSeconds": "data", "checkpointStallSeconds": "saves", "evaluateSeconds": "evaluation"}

Step = Mapping[str, Any]


async def show_job(jobs: AsyncClient, name: str, seconds: float, *, is_json: bool) -> CommandExit:
    """Show a job until it has finished; once where the output is no terminal, or JSON."""
    job = await jobs.get(name)
    while True:
        steps = await jobs.last_steps(job.name, _STEPS)
        if is_json:
            typer.echo(json.dumps(job_document(job, steps or ())))
            return CommandExit.ACCEPTED
        lines = map(escaped_text, screen_lines(job, steps))
        is_live = sys.stdout.isatty()
        width = shutil.get_terminal_size().columns if is_live else None
        typer.echo((_HOME_AND_CLEAR if is_live else "") + "\n".join(line[:width] for line in lines))
        if not is_live or job.is_finished:
            return CommandExit.REFUSED if job.phase is Phase.FAILED else CommandExit.ACCEPTED
        await asyncio.sleep(seconds)
        job = await jobs.get(job.name)


def job_document(job: JobView, steps: Sequence[Step]) -> dict[str, Any]:
    """Return what the screen shows as plain values, with every number of the last step."""
    display = _display_texts(job)
    why = job.status_text("why", "message")
    return {
        "name": job.name,
        "phase": job.status_text("phase") or "New",
        **display,
        "why": why,
        "lastStep": dict(steps[-1]) if steps else None,
    }


def _display_texts(job: JobView) -> dict[str, str]:
    return {key: job.status_text("display", key) for key in ("step", "score", "speed", "eta")}


def screen_lines(job: JobView, steps: Sequence[Step] | None) -> Iterator[str]:
    """Yield the lines of the screen; without steps those that the job itself has."""
    display = _display_texts(job)
    eta = f", {display['eta']} left" if display["eta"] else ""
    yield f"{job.namespace}/{job.name}  {job.status_text('phase') or 'New'}  {display['step']}{eta}"
    if why := job.status_text("why", "message"):
        yield f"why      {why}"
    if not steps:
        yield f"score    {display['score']}"
        yield f"speed    {display['speed']}"
        yield "no pod of it runs, so the step log is not read" if steps is None else "no step is done yet"
        return
    last = steps[-1]
    for name, label in (("loss", "loss"), ("reward", "reward")):
        if _read_number(last, name) is not None:
            yield f"{label:<8} {_read_number(last, name):<10.4g} {_draw_curve(steps, name)}"
    yield from _resource_lines(last, steps)
    yield from _time_lines(steps)


def _resource_lines(last: Step, steps: Sequence[Step]) -> Iterator[str]:
    speed, mfu, flops = (_read_number(last, name) for name in ("tokensPerSecondPerGpu", "mfu", "tflopsPerGpu"))
    if speed is not None:
        curve = _draw_curve(steps, "tokensPerSecondPerGpu")
        yield f"speed    {speed:<10,.4g} {curve} tokens/s/GPU"
    if mfu is not None or flops is not None:
        words = [f"{100 * mfu:.1f} % of peak" if mfu is not None else "", f"{flops:,.0f} TFLOP/s" if flops else ""]
        yield f"GPU      {', '.join(filter(None, words))}"
    if (memory := _read_number(last, "peakMemoryBytes")) is not None:
        yield f"memory   {memory / _GIB:.1f} GiB at most, on the fullest rank"


def _time_lines(steps: Sequence[Step]) -> Iterator[str]:
    seconds = [value for step in steps if (value := _read_number(step, "seconds")) is not None]
    if not seconds:
        return
    total = sum(seconds)
    sums = {label: sum(_read_number(step, name) or 0.0 for step in steps) for name, label in _WAITS.items()}
    shares = [f"{label} {100 * spent / total:.0f} %" for label, spent in sums.items() if spent > 0.005 * total > 0]
    yield f"step     {total / len(seconds):.3g} s, mean of {len(seconds)}" + (
        f"; {', '.join(shares)}" if shares else ""
    )


def _draw_curve(steps: Sequence[Step], name: str) -> str:
    numbers = (_read_number(step, name) for step in steps)
    return draw_sparkline([number for number in numbers if number is not None], _STEPS)


def _read_number(step: Step, name: str) -> float | None:
    value = step.get(name)
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    return float(value) if abs(value) < _BEYOND_SENSE else None
